"""Blocks of another size at the other end: handed over by each way as decode's, or refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from core.block_hash import BlockHash
from core.clock import Deadline
from core.errors import LayoutMismatch
from core.handoff import HandoffTicket
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig, CudaIpc
from kv_transfer.session import SendSession
from kv_transfer.transport import CUDA_IPC
from tests.integration.kv_transfer.ends import CLOCK, LAYOUT, WAYS, DecodeEnd, PrefillEnd, decode_end
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, failure_of, until

SIZES = [(16, 32), (32, 16), (16, 64), (64, 16)]


@asynccontextmanager
async def both(way: str, own: int, wanted: int) -> AsyncIterator[tuple[PrefillEnd, DecodeEnd]]:
    settings = {**WAYS[way], **({"cuda_ipc": CudaIpc.AUTO} if way == CUDA_IPC else {})}
    config = BridgeConfig(**settings, attach_s=5.0)
    layouts = [replace(LAYOUT, block_size=size) for size in (own, wanted)]
    async with decode_end(StorePort(ByteStore(128, layouts[1]), 128)) as decode:
        prefill = PrefillEnd(decode.ref, config, ByteStore(128, layouts[0], seed=1))
        try:
            yield prefill, decode
        finally:
            await prefill.sender.close()


def names(layout: KVLayout) -> tuple[BlockHash, ...]:
    """Each size has its own."""
    return tuple(BlockHash(bytes([layout.block_size, index]) + bytes(14)) for index in range(200))


def start(prefill: PrefillEnd, num_tokens: int) -> tuple[HandoffTicket, SendSession]:
    ticket = prefill.ticket(num_tokens)
    deadline = Deadline.after(20.0, CLOCK)
    return ticket, prefill.sender.open(
        ticket, deadline, lambda layout: names(layout)[: num_tokens // layout.block_size]
    )


def tokens(payload: bytes, layout: KVLayout) -> np.ndarray:
    """`[num_tokens, ...]`."""
    blocks = np.frombuffer(payload, np.uint8).reshape(-1, *layout.block_shape[:-1], layout.head_dim * 4)
    return np.moveaxis(blocks, 4, 1).reshape(blocks.shape[0] * layout.block_size, -1)


def are_the_same(
    prefill: PrefillEnd, decode: DecodeEnd, ticket: HandoffTicket, skipped: range = range(0)
) -> bool:
    own, wanted = prefill.store.layout, decode.port.store.layout
    sent = b"".join(prefill.store.block(index) for index in range(own.num_blocks(ticket.num_tokens)))
    num_blocks = wanted.num_blocks(ticket.num_tokens)
    there = b"".join(decode.port.block(ticket.ticket_id, index) for index in range(num_blocks))
    is_wanted = np.array([index // wanted.block_size not in skipped for index in range(ticket.num_tokens)])
    count = ticket.num_tokens
    return bool((tokens(sent, own)[:count] == tokens(there, wanted)[:count])[is_wanted].all())


@pytest.mark.parametrize(("own", "wanted"), SIZES)
async def test_a_prompt_arrives_in_blocks_of_decodes_size_while_it_is_computed(
    way: str, own: int, wanted: int
) -> None:
    async with both(way, own, wanted) as (prefill, decode):
        for num_tokens in (1, own, wanted + 1, 300):
            ticket, session = start(prefill, num_tokens)
            for index in range(ticket.num_blocks):
                session.add_blocks(index, [index])
                if index == ticket.num_blocks // 2:
                    await session.offered()
            await session.finish(num_tokens)
            assert are_the_same(prefill, decode, ticket)
            assert decode.port.committed[ticket.ticket_id][0] == num_tokens
            decode.port.expire(ticket.ticket_id)
        carried = decode.received_bytes("grpc" if way == CUDA_IPC else way)
        assert carried == sum(
            replace(LAYOUT, block_size=wanted).num_blocks(n) * wanted for n in (1, own, wanted + 1, 300)
        ) * (LAYOUT.bytes_per_token)


async def test_what_decode_holds_is_told_in_its_own_blocks_and_not_sent() -> None:
    async with both("shm", 16, 32) as (prefill, decode):
        decode.port.held = (0, 1, 2)
        ticket, session = start(prefill, 300)
        assert await session.offered() == (0, 1, 2)
        session.add_blocks(0, range(ticket.num_blocks))
        receipt = await session.finish(300)
        assert (receipt.num_held_blocks, receipt.num_pushed_blocks) == (3, 7)
        assert are_the_same(prefill, decode, ticket, skipped=range(3))


def num_refused(decode: DecodeEnd) -> float:
    labels = {"side": "receiver", "code": "layout_mismatch"}
    return decode.counted("baton_kv_transfer_failures_total", **labels)


async def test_after_the_first_offer_the_size_is_known_and_a_pair_that_was_met_knows_it_before() -> None:
    for is_met in (False, True):
        async with both("grpc", 16, 32) as (prefill, decode):
            if is_met:
                prefill.sender.expect([decode.ref])
                await until(lambda: any(pair.is_warm for pair in prefill.metrics.pairs.statuses()))
            assert num_refused(decode) == 0
            for _ in range(3):
                ticket, session = start(prefill, 100)
                session.add_blocks(0, range(ticket.num_blocks))
                await session.finish(100)
            assert num_refused(decode) == (0 if is_met else 1)


async def test_an_aborted_ticket_of_another_size_leaves_nothing() -> None:
    async with both("shm", 16, 64) as (prefill, decode):
        ticket, session = start(prefill, 300)
        session.add_blocks(0, range(9))
        await session.offered()
        await asyncio.sleep(0.05)
        await session.abort("no longer wanted")
        assert ticket.ticket_id not in decode.port.tables


@pytest.mark.parametrize(("own", "wanted"), [(16, 24), (48, 32)])
async def test_sizes_that_do_not_divide_each_other_are_refused_naming_both_and_the_field(
    own: int, wanted: int
) -> None:
    async with both("grpc", own, wanted) as (prefill, decode):
        _, session = start(prefill, 100)
        error = await failure_of(session.offered())
        assert isinstance(error, LayoutMismatch)
        for word in ("prefill-0", "decode-0", f"block_size: {own} vs {wanted}"):
            assert word in error.message
        assert decode.port.tables == {}
        (pair,) = prefill.metrics.pairs.statuses()
        assert pair.problem == error.message


async def test_another_version_of_the_bridge_is_refused_naming_both(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both("grpc", 16, 16) as (prefill, decode):
        monkeypatch.setattr("protos.transfer_codec.VERSION", 7)
        _, session = start(prefill, 100)
        error = await failure_of(session.offered())
        assert isinstance(error, LayoutMismatch)
        for word in ("prefill-0", "decode-0", "version of the bridge: 7 vs 1"):
            assert word in error.message
        assert decode.port.offers == []
