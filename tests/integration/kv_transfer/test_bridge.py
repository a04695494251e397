"""Two asyncio ends over real gRPC on 127.0.0.1, payloads in the frames or in shared memory: what arrives is
what was sent, or it is a typed error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import (
    LayoutMismatch,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    TicketExpired,
    TransferCorrupt,
    TransferTimeout,
    WorkerLost,
)
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef, new_epoch
from core.kv_layout import KVLayout
from kv_transfer.codec import (
    HEADER_BYTES,
    decode_ack,
    encode_frame,
    encode_staged_frame,
    payload_checksum,
)
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.shm_transport import connect_as_configured
from kv_transfer.transport import CommitClaim, Fence, Room, Transport
from tests.integration.kv_transfer.ends import (
    CLOCK,
    LAYOUT,
    WAYS,
    DecodeEnd,
    PrefillEnd,
    decode_end,
    no_task_is_left,
)
from tests.unit.kv_transfer.doubles import (
    ByteStore,
    StorePort,
    failure_of,
    make_ticket,
)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    """How payloads travel; the label under which they are counted."""
    name: str = request.param
    return name


@dataclass
class Bridge:
    """Both ends."""

    way: str
    prefill_end: PrefillEnd
    decode_end: DecodeEnd

    def __post_init__(self) -> None:
        self.prefill, self.decode = self.prefill_end.ref, self.decode_end.ref
        self.store, self.port = self.prefill_end.store, self.decode_end.port
        self.server, self.counted = self.decode_end.server, self.decode_end.counted
        self.ticket, self.open = self.prefill_end.ticket, self.prefill_end.open

    def connect(self, ref: WorkerRef | None = None) -> Transport:
        """A connection of its own, beside the sender's."""
        return self.prefill_end.connect(ref or self.decode)

    def received_bytes(self) -> float:
        return self.decode_end.received_bytes(self.way)


@asynccontextmanager
async def bridge(
    way: str,
    num_blocks: int = 256,
    layout: KVLayout = LAYOUT,
    held: tuple[int, ...] = (),
    config: BridgeConfig | None = None,
) -> AsyncIterator[Bridge]:
    config = replace(config or BridgeConfig(), shm=WAYS[way])
    async with decode_end(StorePort(ByteStore(num_blocks, layout), num_blocks, held)) as decode:
        prefill = PrefillEnd(decode.ref, config, ByteStore(num_blocks, layout, seed=1))
        try:
            yield Bridge(way, prefill, decode)
        finally:
            await prefill.sender.close()
    await no_task_is_left()


def blocks_of(ends: Bridge, ticket: HandoffTicket, indexes: range) -> bool:
    """Whether the blocks at decode equal those at prefill, whose block ids are the indexes here."""
    return all(ends.port.block(ticket.ticket_id, i) == ends.store.block(i) for i in indexes)


async def test_random_bytes_pushed_in_chunks_arrive_unchanged_and_are_counted_once(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(199 * 16 + 5)
        session = ends.open(ticket)
        assert await session.offered() == ()
        for first in range(0, 200, 40):
            session.add_blocks(first, range(first, first + 40))
            await asyncio.sleep(0.01)
        receipt = await session.finish(ticket.num_tokens)
        assert blocks_of(ends, ticket, range(200))
        assert ends.port.committed == {ticket.ticket_id: (ticket.num_tokens, 200)}
        assert receipt.num_pushed_bytes == 200 * LAYOUT.block_bytes
        assert ends.received_bytes() == 200 * LAYOUT.block_bytes
        assert ends.counted("baton_kv_transfer_seconds_count", transport=way) == 1


async def test_only_blocks_that_decode_lacks_are_read_and_sent(way: str) -> None:
    held = tuple(range(60))
    async with bridge(way, held=held) as ends:
        ticket = ends.ticket(100 * 16)
        session = ends.open(ticket)
        session.add_blocks(0, range(100))  # before the offer is answered
        assert await session.offered() == held
        receipt = await session.finish(ticket.num_tokens)
        assert sorted(ends.store.blocks_read) == list(range(60, 100))
        assert (receipt.num_held_blocks, receipt.num_pushed_blocks) == (60, 40)
        assert ends.received_bytes() == 40 * LAYOUT.block_bytes
        assert blocks_of(ends, ticket, range(60, 100))


async def test_a_ticket_of_which_decode_holds_all_blocks_is_committed_without_a_byte(way: str) -> None:
    async with bridge(way, held=tuple(range(10))) as ends:
        ticket = ends.ticket(160)
        session = ends.open(ticket)
        session.add_blocks(0, range(10))
        receipt = await session.finish(ticket.num_tokens)
        assert receipt.num_pushed_blocks == 0
        assert ends.received_bytes() == 0
        assert ends.port.committed == {ticket.ticket_id: (160, 0)}


async def test_many_tickets_at_once_share_a_connection_and_stay_apart(way: str) -> None:
    async with bridge(way, num_blocks=16 * 20) as ends:

        async def hand_over(number: int) -> HandoffTicket:
            ticket = ends.ticket(20 * 16)
            session = ends.open(ticket)
            session.add_blocks(0, range(number * 20, number * 20 + 20))
            await session.finish(ticket.num_tokens)
            return ticket

        tickets = await asyncio.gather(*(hand_over(number) for number in range(16)))
        for number, ticket in enumerate(tickets):
            for index in range(20):
                assert ends.port.block(ticket.ticket_id, index) == ends.store.block(number * 20 + index)
        assert ends.received_bytes() == 16 * 20 * LAYOUT.block_bytes


class Corrupting:
    """A connection that flips one bit of the frame that the test chooses; of its payload where the position
    lies behind the header, wherever the payload is.
    """

    def __init__(self, inner: Transport, frame_number: int, position: int) -> None:
        self.frame_number, self.position = frame_number, position
        self.num_sent = 0
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_push(self) -> Any:
        push = await self._inner.open_push()
        send, find_room = push.send, push.room
        room: Room | None = None

        async def remember_room(ticket_id: TicketId, num_bytes: int) -> Room | None:
            nonlocal room
            room = await find_room(ticket_id, num_bytes)
            return room

        async def send_corrupted(frame: bytes) -> None:
            if self.num_sent == self.frame_number:
                if room is None or 0 <= self.position < HEADER_BYTES:
                    damaged = bytearray(frame)
                    damaged[self.position] ^= 1
                    frame = bytes(damaged)
                else:
                    position = self.position - HEADER_BYTES if self.position > 0 else self.position
                    room.memory[position] ^= 1
            self.num_sent += 1
            await send(frame)

        push.send, push.room = send_corrupted, remember_room  # type: ignore[method-assign]
        return push


@pytest.mark.parametrize("position", [0, 20, 40, 60, 71, 72, 72 + 16384 - 1, -1])
@pytest.mark.parametrize("frame_number", [0, 2])
async def test_one_flipped_bit_anywhere_in_a_frame_ends_the_ticket_and_is_never_committed(
    way: str, position: int, frame_number: int
) -> None:
    config = BridgeConfig(
        frame_bytes=2 * LAYOUT.block_bytes, staged_frame_bytes=2 * LAYOUT.block_bytes, shm=WAYS[way]
    )
    async with bridge(way) as ends:
        connect = connect_as_configured(config)
        sender = Sender(
            ends.store,
            ends.prefill,
            lambda ref: Corrupting(connect(ref), frame_number, position),
            CLOCK,
            TransferMetrics(CollectorRegistry()),
            config,
        )
        ticket = ends.ticket(160)
        session = sender.open(ticket, Deadline.after(10, CLOCK))
        session.add_blocks(0, range(10))
        error = await failure_of(session.finish(ticket.num_tokens))
        assert isinstance(error, TransferCorrupt)
        await sender.close()
        assert ticket.ticket_id in ends.port.aborted
        assert ticket.ticket_id not in ends.port.tables
        assert ends.port.committed == {}
        assert ends.counted("baton_kv_transfer_failures_total", side="receiver", code="transfer_corrupt") == 1


async def test_a_refused_offer_is_heard_at_once_and_with_its_reason(way: str) -> None:
    async with bridge(way, num_blocks=8) as ends:
        ticket = ends.ticket(9 * 16)
        session = ends.open(ticket)
        started = time.monotonic()
        error = await failure_of(session.offered())
        assert time.monotonic() - started < 1
        assert isinstance(error, ReservationRefused)
        assert error.details["num_free"] == 8
        assert isinstance(await failure_of(session.finish(ticket.num_tokens)), ReservationRefused)


async def test_a_layout_mismatch_names_both_workers_and_each_differing_field(way: str) -> None:
    async with bridge(way) as ends:
        other = replace(LAYOUT, block_size=32, dtype="float16")
        store = ByteStore(4, other)
        sender = Sender(store, ends.prefill, ends.connect, CLOCK, TransferMetrics(CollectorRegistry()))
        session = sender.open(make_ticket(64, ends.prefill, ends.decode, other), Deadline.after(5, CLOCK))
        error = await failure_of(session.offered())
        await sender.close()
        assert isinstance(error, LayoutMismatch)
        for part in ("prefill-0", "decode-0", "block_size: 32 vs 16", "dtype: float16 vs float32"):
            assert part in error.message
        assert ends.port.offers == []


async def test_a_message_for_another_incarnation_is_refused(way: str) -> None:
    async with bridge(way) as ends:
        stale = replace(ends.decode, epoch=new_epoch())
        ticket = make_ticket(64, ends.prefill, stale, LAYOUT)
        assert isinstance(await failure_of(ends.open(ticket).offered()), StaleEpoch)
        transport = ends.connect()
        fence = Fence.of(ticket)
        for call in (
            transport.commit(fence, CommitClaim(64, 4, 0)),
            transport.abort(fence, "test", 5.0),
            transport.keepalive(fence),
        ):
            assert isinstance(await failure_of(call), StaleEpoch)
        await transport.close()
        assert ends.port.offers == []


@dataclass(frozen=True)
class Run:
    """Blocks to push; block ids at prefill are the indexes in the ticket here."""

    fence: Fence
    first_index: int
    num_blocks: int


async def push_runs(ends: Bridge, transport: Transport, runs: list[Run]) -> list[ServingError | None]:
    """Errors of the acknowledgements, None for written, until the stream ends or all are acknowledged."""
    push = await transport.open_push()
    for run in runs:
        ids = range(run.first_index, run.first_index + run.num_blocks)
        room = await push.room(run.fence.ticket_id, run.num_blocks * LAYOUT.block_bytes)
        assert (room is not None) == (ends.way == "shm")
        if room is None:
            frame, _ = encode_frame(*place_of(run), ends.store.read_blocks(ids))
        else:
            ends.store.read_blocks_into(ids, room.memory)
            frame, _ = encode_staged_frame(*place_of(run), room.memory, room.place)
        await push.send(frame)
    found: list[ServingError | None] = []
    async for data in push.acks():
        found.append(decode_ack(data).error)
        if len(found) == len(runs):
            break
    await push.close()
    return found


def place_of(run: Run) -> tuple[Fence, int, int]:
    return run.fence, run.first_index, run.num_blocks


def checksum_of(ends: Bridge, run: Run) -> int:
    ids = range(run.first_index, run.first_index + run.num_blocks)
    return payload_checksum(run.fence.ticket_id, ends.store.read_blocks(ids))


async def test_frames_of_another_prefill_incarnation_do_not_reach_the_blocks(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(64)
        transport = ends.connect()
        await transport.offer(ticket, 5.0)
        forged = replace(Fence.of(ticket), sender_epoch=new_epoch())
        (error,) = await push_runs(ends, transport, [Run(forged, 0, 1)])
        assert isinstance(error, StaleEpoch)
        assert ends.port.writes == []
        await transport.close()


async def test_repeated_frames_are_acknowledged_written_once_and_counted_once(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(64)
        transport = ends.connect()
        assert await transport.offer(ticket, 5.0) == await transport.offer(ticket, 5.0)
        first, second = Run(Fence.of(ticket), 0, 2), Run(Fence.of(ticket), 2, 2)
        assert await push_runs(ends, transport, [first, first, second]) == [None] * 3
        assert await push_runs(ends, transport, [second, first]) == [None] * 2
        assert ends.received_bytes() == 4 * LAYOUT.block_bytes
        claim = CommitClaim(64, 4, checksum_of(ends, first) ^ checksum_of(ends, second))
        receipt = await transport.commit(Fence.of(ticket), claim)
        assert await transport.commit(Fence.of(ticket), claim) == receipt
        assert receipt.num_written_bytes == 4 * LAYOUT.block_bytes
        assert blocks_of(ends, ticket, range(4))
        assert len(ends.port.offers) == 1
        await transport.close()


async def test_a_late_frame_after_an_abort_is_refused_as_expired(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(64)
        transport = ends.connect()
        await transport.offer(ticket, 5.0)
        await transport.abort(Fence.of(ticket), "test", 5.0)
        (error,) = await push_runs(ends, transport, [Run(Fence.of(ticket), 0, 1)])
        assert isinstance(error, TicketExpired)
        assert isinstance(await failure_of(transport.offer(ticket, 5.0)), TicketExpired)
        await transport.abort(Fence.of(ticket), "again", 5.0)  # answered
        await transport.close()


async def test_an_abort_in_mid_push_frees_decode_and_reads_no_block_any_more(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(200 * 16)
        session = ends.open(ticket)
        await session.offered()
        session.add_blocks(0, range(100))
        await asyncio.sleep(0.02)
        finishing = asyncio.create_task(session.finish(ticket.num_tokens))
        await session.abort("the client left")
        assert ticket.ticket_id not in ends.port.tables
        read = len(ends.store.blocks_read)
        session.add_blocks(100, range(100, 200))
        await asyncio.sleep(0.05)
        assert len(ends.store.blocks_read) == read
        assert (await failure_of(finishing)).code == "cancelled"
        await session.abort("again")


async def test_decode_gone_in_mid_push_ends_the_session_within_the_bounded_silence(way: str) -> None:
    config = BridgeConfig(silence_s=1.5, keepalive_s=0.3, abort_s=0.5)
    async with bridge(way, config=config) as ends:
        ticket = ends.ticket(100 * 16)
        session = ends.open(ticket)
        session.add_blocks(0, range(50))
        await session.offered()
        await asyncio.sleep(0.1)
        await ends.server.stop(0)
        session.add_blocks(50, range(50, 100))
        started = time.monotonic()
        error = await failure_of(session.finish(ticket.num_tokens))
        assert isinstance(error, TransferTimeout)
        assert time.monotonic() - started < 4.0


async def test_a_worker_that_is_not_there_is_heard_of_at_once(way: str) -> None:
    async with bridge(way) as ends:
        nobody = replace(ends.decode, address="127.0.0.1:1")
        session = ends.open(make_ticket(64, ends.prefill, nobody, LAYOUT))
        started = time.monotonic()
        assert isinstance(await failure_of(session.offered()), WorkerLost)
        assert time.monotonic() - started < 2


async def test_prefill_that_stops_in_mid_push_leaves_decode_open_until_it_expires(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(64)
        transport = ends.connect()
        await transport.offer(ticket, 5.0)
        first = Run(Fence.of(ticket), 0, 1)
        assert await push_runs(ends, transport, [first]) == [None]
        await transport.close()  # P is gone; decode's silence rule ends the ticket
        ends.port.expire(ticket.ticket_id)
        again = ends.connect()
        await again.offer(ends.ticket(16), 5.0)
        (error,) = await push_runs(ends, again, [Run(Fence.of(ticket), 1, 1)])
        assert isinstance(error, TicketExpired)
        claim = CommitClaim(64, 1, checksum_of(ends, first))
        assert isinstance(await failure_of(again.commit(Fence.of(ticket), claim)), TicketExpired)
        assert ends.port.committed == {}
        await again.close()


async def test_a_commit_that_claims_other_blocks_than_arrived_is_refused_and_aborts(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(64)
        transport = ends.connect()
        await transport.offer(ticket, 5.0)
        run = Run(Fence.of(ticket), 0, 3)
        assert await push_runs(ends, transport, [run]) == [None]
        claim = CommitClaim(64, 4, checksum_of(ends, run))
        error = await failure_of(transport.commit(Fence.of(ticket), claim))
        assert isinstance(error, TransferCorrupt)
        assert ticket.ticket_id in ends.port.aborted
        await transport.close()


async def test_sixty_megabytes_cross_quickly_and_unchanged(way: str) -> None:
    # 30 layers × K, V × 3 heads × 16 slots × 64 × 4 bytes = 720 KiB a block: a small real model
    layout = KVLayout(model="real", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    async with bridge(way, num_blocks=82, layout=layout) as ends:
        ticket = ends.ticket(82 * 16)
        session = ends.open(ticket)
        await session.offered()
        started = time.perf_counter()
        session.add_blocks(0, range(82))
        receipt = await session.finish(ticket.num_tokens)
        elapsed = time.perf_counter() - started
        megabytes = receipt.num_pushed_bytes / 1e6
        print(f"\n{megabytes:.1f} MB over {way} in {elapsed:.3f} s: {megabytes / elapsed:.0f} MB/s")
        assert blocks_of(ends, ticket, range(82))
        assert megabytes / elapsed > 20
