"""Process groups between two ends, over real gloo: who gets one, what comes without it, and that pairs do not
disturb each other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from core.errors import HandoffError, InvalidConfig
from core.peer_security import PeerSecurity, TlsIdentity
from kv_transfer.config import BridgeConfig, CudaIpc, Distributed, ReceiverConfig, SharedMemory
from kv_transfer.group_transport import usable_groups
from kv_transfer.key_exchange import KeyExchange
from kv_transfer.pair_group import PREFILL_RANK, PairGroup
from kv_transfer.shm_handshake import Fallback
from kv_transfer.transport import DISTRIBUTED
from tests.integration.kv_transfer.ends import (
    LAYOUT,
    DecodeEnd,
    PrefillEnd,
    decode_end,
    no_task_is_left,
    real_groups,
)
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, failure_of, until

BLOCK = LAYOUT.block_bytes
CONFIG = BridgeConfig(
    shm=SharedMemory.NEVER,
    cuda_ipc=CudaIpc.NEVER,
    group_frame_bytes=4 * BLOCK,
    group_staging_bytes=16 * BLOCK,
    attach_s=5.0,
    attach_again_s=0.2,
)
"""Four slots of four blocks."""


@dataclass
class Ends:
    decode: DecodeEnd
    prefill: PrefillEnd


@asynccontextmanager
async def both(config: BridgeConfig = CONFIG, receiver: ReceiverConfig | None = None) -> AsyncIterator[Ends]:
    async with decode_end(StorePort(ByteStore(256, LAYOUT), 256), receiver) as decode:
        ends = Ends(decode, PrefillEnd(decode.ref, config, ByteStore(64, LAYOUT, seed=1)))
        try:
            yield ends
        finally:
            await ends.prefill.sender.close()
        await until(lambda: decode.group_staging_bytes() == 0, 10.0)
    await no_task_is_left()


async def test_one_group_serves_all_tickets_of_a_pair_and_is_given_back_at_the_end() -> None:
    async with both() as ends:
        for _ in range(3):
            ticket = await ends.prefill.hand_over(40)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.decode.group_staging_bytes() == 16 * BLOCK
        tickets = await asyncio.gather(*(ends.prefill.hand_over(15) for _ in range(8)))
        assert all(ends.decode.holds(ticket, ends.prefill.store) for ticket in tickets)
        assert ends.decode.received_bytes(DISTRIBUTED) == (120 + 8 * 15) * BLOCK
        assert ends.decode.received_bytes("grpc") == 0


async def test_a_pair_that_ends_does_not_disturb_another_one_of_the_same_worker() -> None:
    async with both() as ends:
        other = PrefillEnd(ends.decode.ref, CONFIG, ByteStore(64, LAYOUT, seed=2))
        await asyncio.gather(ends.prefill.hand_over(20), other.hand_over(20))
        assert ends.decode.group_staging_bytes() == 32 * BLOCK
        ticket = ends.prefill.ticket(40 * 16)
        session = ends.prefill.open(ticket)
        session.add_blocks(0, range(20))
        await session.offered()
        await other.sender.close()
        await until(lambda: ends.decode.group_staging_bytes() == 16 * BLOCK)
        session.add_blocks(20, range(20, 40))
        await session.finish(ticket.num_tokens)
        assert ends.decode.holds(ticket, ends.prefill.store)
        assert ends.decode.received_bytes("grpc") == 0


# ---------------------------------------------------------------- what comes without it


class Impostor:
    """Whoever forms the group did not hear what was told on the stream."""

    backend = "gloo"

    def __init__(self) -> None:
        self._groups = real_groups()

    def form(self, rank: int, keys: KeyExchange, num_bytes: int, attach_s: float, op_s: float) -> PairGroup:
        group = self._groups.form(rank, keys, num_bytes, attach_s, op_s)
        swap = group.swap
        group.swap = lambda mine: swap(secrets.token_bytes(len(mine)))  # type: ignore[method-assign]
        return group


class Alone:
    """Nobody comes to the group."""

    backend = "gloo"

    def form(self, rank: int, keys: KeyExchange, num_bytes: int, attach_s: float, op_s: float) -> PairGroup:
        assert rank != PREFILL_RANK
        raise OSError("no such network")


def decodes(groups: Any) -> Callable[[Ends], None]:
    def change(ends: Ends) -> None:
        assert ends.decode.groups is not None
        ends.decode.groups._groups = groups

    return change


class OtherBackend:
    backend = "nccl"


def no_change(ends: Ends) -> None:
    """The configuration alone stands in the way."""


WAYS_TO_FAIL: dict[str, tuple[Fallback, Callable[[Ends], None], ReceiverConfig]] = {
    "decode does not offer it": (
        Fallback.NOT_OFFERED,
        no_change,
        ReceiverConfig(distributed=Distributed.NEVER),
    ),
    "no room for another pair": (
        Fallback.LIMIT,
        no_change,
        ReceiverConfig(max_group_staging_bytes=15 * BLOCK),
    ),
    "another backend": (Fallback.UNSUPPORTED, decodes(OtherBackend()), ReceiverConfig()),
    "somebody else at the other end": (Fallback.BROKEN, decodes(Impostor()), ReceiverConfig()),
    "nobody at the other end": (Fallback.BROKEN, decodes(Alone()), ReceiverConfig()),
}


@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_cannot_be_had_payloads_travel_in_frames_and_the_reason_is_counted(case: str) -> None:
    reason, change, receiver = WAYS_TO_FAIL[case]
    async with both(receiver=receiver) as ends:
        change(ends)
        for count in (1, 2):
            ticket = await ends.prefill.hand_over(10)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.prefill.num_fallbacks(f"distributed_{reason}") == count
        assert ends.decode.received_bytes("grpc") == 20 * BLOCK
        assert ends.decode.received_bytes(DISTRIBUTED) == 0


@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_is_required_and_cannot_be_had_the_handoff_is_refused_and_nothing_stays_reserved(
    case: str,
) -> None:
    reason, change, receiver = WAYS_TO_FAIL[case]
    async with both(replace(CONFIG, distributed=Distributed.REQUIRED), receiver) as ends:
        change(ends)
        error = await failure_of(ends.prefill.open(ends.prefill.ticket(160)).offered())
        assert type(error) is HandoffError
        assert error.details["reason"] == reason
        assert ends.decode.port.tables == {}


async def test_a_group_that_is_lost_in_mid_push_costs_no_block_the_rest_travels_in_frames() -> None:
    async with both() as ends:
        assert ends.decode.groups is not None
        ticket = ends.prefill.ticket(40 * 16)
        session = ends.prefill.open(ticket)
        await session.offered()
        session.add_blocks(0, range(20))
        await until(lambda: ends.decode.received_bytes(DISTRIBUTED) == 20 * BLOCK)
        ends.decode.port.gate.clear()
        session.add_blocks(20, range(20, 32))
        await asyncio.sleep(0.05)
        await ends.decode.groups.close()
        ends.decode.port.gate.set()
        session.add_blocks(32, range(32, 40))
        await session.finish(ticket.num_tokens)
        assert ends.decode.holds(ticket, ends.prefill.store)
        assert ends.decode.received_bytes("grpc") >= 8 * BLOCK
        assert ends.decode.received_bytes("grpc") + ends.decode.received_bytes(DISTRIBUTED) == 40 * BLOCK


async def test_aborted_tickets_leave_the_group_in_order() -> None:
    """Payloads that nobody wants any more are received, and the next ticket's are not mistaken for them."""
    async with both() as ends:
        for _ in range(5):
            session = ends.prefill.open(ends.prefill.ticket(40 * 16))
            await session.offered()
            ends.decode.port.gate.clear()
            session.add_blocks(0, range(40))
            await asyncio.sleep(0.01)
            await session.abort("no longer wanted")
            ends.decode.port.gate.set()
            ticket = await ends.prefill.hand_over(13)
            assert ends.decode.holds(ticket, ends.prefill.store)
            ends.decode.port.expire(ticket.ticket_id)
        assert ends.decode.received_bytes("grpc") == 0


def test_with_tls_groups_are_used_only_if_they_are_required() -> None:
    security = PeerSecurity(None, TlsIdentity(b"certificate", b"key", b"authority"))
    groups = real_groups()
    assert usable_groups(Distributed.AUTO, security, groups) is None
    assert usable_groups(Distributed.REQUIRED, security, groups) is groups
    assert usable_groups(Distributed.AUTO, PeerSecurity(), groups) is groups
    assert usable_groups(Distributed.NEVER, PeerSecurity(), groups) is None
    with pytest.raises(InvalidConfig, match=r"bridge\.distributed"):
        usable_groups(Distributed.REQUIRED, PeerSecurity(), None)
