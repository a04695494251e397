"""Pairs that are made ready before a request asks, by each way; what is seen of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from core.ids import new_epoch
from core.pair_status import PairStatus
from kv_transfer.config import BridgeConfig, SharedMemory
from kv_transfer.transport import CUDA_IPC, DISTRIBUTED, SHM
from tests.integration.kv_transfer.ends import (
    LAYOUT,
    WAYS,
    DecodeEnd,
    PrefillEnd,
    decode_end,
    no_task_is_left,
)
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, until

BLOCK = LAYOUT.block_bytes


@dataclass
class Ends:
    decode: DecodeEnd
    prefill: PrefillEnd

    def pair(self) -> PairStatus:
        (found,) = self.prefill.metrics.pairs.statuses()
        return found

    def staged_bytes(self) -> float:
        decode = self.decode
        return decode.staging_bytes() + decode.device_staging_bytes() + decode.group_staging_bytes()


@asynccontextmanager
async def both(config: BridgeConfig) -> AsyncIterator[Ends]:
    async with decode_end(StorePort(ByteStore(256, LAYOUT), 256)) as decode:
        ends = Ends(decode, PrefillEnd(decode.ref, config, ByteStore(64, LAYOUT, seed=1)))
        try:
            yield ends
        finally:
            await ends.prefill.sender.close()
    await no_task_is_left()


async def test_a_pair_is_ready_before_its_first_ticket_which_goes_the_way_that_was_made(way: str) -> None:
    async with both(BridgeConfig(**WAYS[way], attach_s=5.0)) as ends:
        ends.prefill.sender.expect([ends.decode.ref])
        await until(lambda: bool(ends.prefill.metrics.pairs.statuses()))
        assert (ends.pair().transport, ends.pair().is_warm) == (way, True)
        assert ends.decode.port.offers == [], "nothing was reserved for it"
        made = ends.staged_bytes()
        assert (made > 0) == (way != "grpc")
        ticket = await ends.prefill.hand_over(40)
        assert ends.decode.holds(ticket, ends.prefill.store)
        assert ends.staged_bytes() == made, "the first ticket has used what was there"
        pair = ends.pair()
        assert pair.num_bytes == ((way, 40 * BLOCK),)
        assert pair.bytes_per_s > 0
        assert pair.fallbacks == ()
        count = ends.prefill.registry.get_sample_value
        labels = {"peer": "decode-0", "transport": way}
        assert count("baton_kv_pair_bytes_total", labels) == 40 * BLOCK
        assert count("baton_kv_pair_transport", labels) == 1
        assert count("baton_kv_pair_bytes_per_second", {"peer": "decode-0"}) == pair.bytes_per_s
        assert count("baton_kv_warm_pairs") == 1


@pytest.mark.parametrize("way", [SHM, CUDA_IPC, DISTRIBUTED])
async def test_what_was_made_for_a_worker_that_is_gone_is_given_back_soon(way: str) -> None:
    async with both(BridgeConfig(**WAYS[way], attach_s=5.0, idle_connection_s=0.05)) as ends:
        ends.prefill.sender.expect([ends.decode.ref])
        await until(lambda: ends.staged_bytes() > 0)
        await asyncio.sleep(0.2)
        assert ends.staged_bytes() > 0, "idle, but expected"
        ends.prefill.sender.expect([])
        await until(lambda: ends.staged_bytes() == 0)
        assert ends.prefill.metrics.pairs.statuses() == ()
        await ends.prefill.sender.close()
        ends.prefill.sender.expect([ends.decode.ref])  # too late: nothing is begun


async def test_no_more_pairs_are_made_ready_than_configured() -> None:
    async with both(BridgeConfig(**WAYS["grpc"], max_warm_pairs=3)) as ends:
        refs = [replace(ends.decode.ref, epoch=new_epoch()) for _ in range(7)]
        ends.prefill.sender.expect(refs)
        await asyncio.sleep(0.1)
        assert ends.prefill.sender.num_connections == 3
        ends.prefill.sender.expect(refs)
        assert ends.prefill.sender.num_connections == 3


async def test_a_worker_whose_blocks_are_others_is_not_met_again_and_both_and_the_field_are_named() -> None:
    async with both(BridgeConfig(**WAYS["grpc"])) as ends:
        other = replace(LAYOUT, head_dim=64)
        prefill = PrefillEnd(ends.decode.ref, BridgeConfig(**WAYS["grpc"]), ByteStore(4, other))
        prefill.sender.expect([ends.decode.ref])
        await until(lambda: bool(prefill.metrics.pairs.statuses()))
        (pair,) = prefill.metrics.pairs.statuses()
        assert not pair.is_warm
        for word in ("prefill-0", "decode-0", "head_dim: 64 vs 32"):
            assert word in pair.problem
        await prefill.sender.close()


async def test_a_fallback_is_told_with_its_reason() -> None:
    config = BridgeConfig(**{**WAYS["grpc"], "shm": SharedMemory.AUTO}, staging_bytes=1)
    async with both(config) as ends:
        await ends.prefill.hand_over(4)
        await ends.prefill.hand_over(4)
        pair = ends.pair()
        assert pair.transport == "grpc"
        assert pair.fallbacks == (("limit", 2),)
        labels = {"peer": "decode-0", "reason": "limit"}
        assert ends.prefill.registry.get_sample_value("baton_kv_pair_fallbacks_total", labels) == 2
