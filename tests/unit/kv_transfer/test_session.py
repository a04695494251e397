"""A session hands all blocks over, or ends on both sides with a typed error in bounded (virtual) time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

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
    WorkerDraining,
    WorkerLost,
)
from core.ids import Epoch, TicketId
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from tests.unit.kv_transfer.doubles import (
    LAYOUT,
    PREFILL,
    ByteStore,
    DecodeEnd,
    LoopClock,
    TroubledTransport,
    failure_of,
    in_virtual_time,
    make_ticket,
    until,
)
from tests.unit.kv_transfer.session_pair import CONFIG, now, pair

# ---------------------------------------------------------------- the good way


@in_virtual_time
async def test_chunks_are_pushed_as_they_complete_and_committed_at_the_end() -> None:
    async with pair() as ends:
        ticket = make_ticket(38)
        session = ends.open(ticket)
        assert await session.offered() == ()
        session.add_blocks(0, [0, 1, 2, 3])
        await until(lambda: len(ends.decode.port.writes) == 2)
        assert ends.arrived(ticket, range(4))  # before the rest is computed
        session.add_blocks(4, [4, 5, 6, 7, 8, 9])
        receipt = await session.finish(38)
        assert ends.arrived(ticket, range(10))
        assert ends.decode.port.committed == {ticket.ticket_id: (38, 10)}
        assert (receipt.num_held_blocks, receipt.num_pushed_blocks) == (0, 10)
        assert receipt.num_pushed_bytes == 10 * LAYOUT.block_bytes
        assert await session.ended() is None
        assert session.error is None


@in_virtual_time
async def test_a_receipt_tells_how_long_pushing_took_and_what_of_it_came_after_the_computation() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16))
        await session.offered()
        ends.transport.is_down = True
        session.add_blocks(0, [0, 1])
        await asyncio.sleep(2)  # pushing fails, and time goes by
        ends.transport.is_down = False
        await until(lambda: len(ends.decode.port.writes) == 1)
        await asyncio.sleep(3)  # all that was added has arrived: prefill computes, nobody pushes
        computed_at = now()
        session.add_blocks(2, [2, 3])
        receipt = await session.finish(16, computed_at - 0.25)
        assert receipt.wait_s == pytest.approx(0.25, abs=0.1)
        assert 2.0 <= receipt.push_s < 3.0
        counted = ends.registry.get_sample_value
        for name, seconds in (("exposed", receipt.wait_s), ("push", receipt.push_s)):
            labels = {"transport": "troubled"}
            assert counted(f"baton_kv_{name}_seconds_sum", labels) == pytest.approx(seconds)
            assert counted(f"baton_kv_{name}_seconds_count", labels) == 1


@in_virtual_time
async def test_blocks_that_decode_holds_are_neither_read_nor_sent() -> None:
    async with pair(held=(0, 1, 2, 5)) as ends:
        ticket = make_ticket(32)
        session = ends.open(ticket)
        session.add_blocks(0, range(8))
        receipt = await session.finish(32)
        assert ends.store.blocks_read == [3, 4, 6, 7]
        assert (receipt.num_held_blocks, receipt.num_pushed_blocks) == (4, 4)


@in_virtual_time
async def test_a_ticket_that_decode_holds_whole_is_committed_without_a_stream() -> None:
    async with pair(held=range(4)) as ends:
        session = ends.open(make_ticket(16))
        session.add_blocks(0, range(4))
        await session.finish(16)
        assert ends.transport.num_streams == 0


@in_virtual_time
async def test_blocks_may_be_added_from_another_thread_before_the_offer_is_answered() -> None:
    async with pair() as ends:
        ticket = make_ticket(32)
        session = ends.open(ticket)

        def compute() -> None:
            for index in range(8):
                session.add_blocks(index, [index])

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        await session.finish(32)
        assert ends.arrived(ticket, range(8))


@in_virtual_time
async def test_a_long_pause_between_chunks_is_bridged_by_a_keepalive_each_second() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16))
        session.add_blocks(0, [0, 1])
        await asyncio.sleep(10)
        times = ends.decode.port.keepalives
        assert len(times) in (9, 10)
        assert all(later - earlier <= 1.1 for earlier, later in pairwise(times))
        session.add_blocks(2, [2, 3])
        await session.finish(16)


@in_virtual_time
async def test_no_keepalive_is_sent_while_blocks_flow() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(40 * 4))
        for index in range(40):
            session.add_blocks(index, [index])
            await asyncio.sleep(0.3)
        await session.finish(160)
        assert ends.decode.port.keepalives == []


@in_virtual_time
async def test_bytes_in_flight_are_bounded_while_decode_is_slow() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(40 * 4))
        await session.offered()
        ends.decode.port.gate.clear()
        session.add_blocks(0, range(40))
        await asyncio.sleep(2)
        assert len(ends.store.blocks_read) == 6
        ends.decode.port.gate.set()
        await session.finish(160)


@in_virtual_time
async def test_sessions_share_one_connection_which_is_closed_when_idle() -> None:
    decode, store = DecodeEnd(), ByteStore(64, seed=9)
    made: list[TroubledTransport] = []

    def connect(ref: object) -> TroubledTransport:
        made.append(TroubledTransport(decode.directory.connect(decode.ref)))
        return made[-1]

    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(store, PREFILL, connect, LoopClock(), metrics, CONFIG)

    async def hand_over() -> None:
        session = sender.open(make_ticket(16), Deadline.after(10, LoopClock()))
        session.add_blocks(0, range(4))
        await session.finish(16)

    await asyncio.gather(hand_over(), hand_over())
    await hand_over()
    assert len(made) == 1
    await asyncio.sleep(CONFIG.idle_connection_s / 2)
    await hand_over()
    await asyncio.sleep(CONFIG.idle_connection_s / 2 + 1)
    assert not made[0].is_closed
    await asyncio.sleep(CONFIG.idle_connection_s / 2)
    assert made[0].is_closed, "closed by time, not by the next transfer"
    await hand_over()
    assert len(made) == 2
    await sender.close()
    assert made[1].is_closed
    assert isinstance(
        await failure_of(sender.open(make_ticket(16), Deadline.after(1, LoopClock())).offered()), WorkerLost
    )


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("error", [ReservationRefused("full"), WorkerDraining("leaving"), StaleEpoch("new")])
@in_virtual_time
async def test_a_refused_offer_raises_its_reason_everywhere_and_needs_no_abort(error: ServingError) -> None:
    async with pair() as ends:
        ends.decode.port.refusal = error
        session = ends.open(make_ticket(16))
        session.add_blocks(0, range(4))
        assert type(await failure_of(session.offered())) is type(error)
        assert type(await failure_of(session.finish(16))) is type(error)
        assert type(await session.ended()) is type(error)
        assert session.error is not None
        assert ends.failures(error.code) == 1
        await session.abort("cleaning up")
        assert ends.transport.num_aborts == 0
        assert ends.store.blocks_read == []


@in_virtual_time
async def test_a_ticket_that_is_not_this_workers_to_send_is_refused_at_open() -> None:
    async with pair() as ends:
        with pytest.raises(StaleEpoch):
            ends.open(make_ticket(16, prefill=replace(PREFILL, epoch=Epoch(8))))
        with pytest.raises(LayoutMismatch):
            ends.open(make_ticket(16, layout=replace(LAYOUT, num_layers=3)))
        with pytest.raises(TransferCorrupt):
            ends.open(make_ticket(16, ticket_id=TicketId("ticket-1")))


@in_virtual_time
async def test_a_corrupted_frame_ends_the_session_and_the_reservation() -> None:
    async with pair() as ends:
        ends.transport.alter = lambda frame: frame[:-1] + bytes([frame[-1] ^ 1])
        ticket = make_ticket(16)
        session = ends.open(ticket)
        session.add_blocks(0, range(4))
        assert isinstance(await failure_of(session.finish(16)), TransferCorrupt)
        assert ticket.ticket_id in ends.decode.port.aborted
        assert ends.decode.port.committed == {}
        assert ends.failures("transfer_corrupt") == 1


@in_virtual_time
async def test_a_reservation_that_expired_at_decode_ends_the_session_at_the_next_sign() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket)
        await session.offered()
        ends.decode.port.expire(ticket.ticket_id)
        async with asyncio.timeout(1.5):
            assert isinstance(await session.ended(), TicketExpired)
        assert isinstance(await failure_of(session.finish(16)), TicketExpired)


@in_virtual_time
async def test_blocks_that_were_never_added_fail_the_session_instead_of_hanging_it() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket)
        session.add_blocks(0, [0, 1, 2])
        error = await failure_of(session.finish(16))
        assert "never added" in error.message
        await session.abort("failed")
        assert ticket.ticket_id in ends.decode.port.aborted


@in_virtual_time
async def test_adding_a_block_twice_or_outside_the_ticket_is_a_bug_that_asserts() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16))
        session.add_blocks(0, [0, 1])
        for first, ids in ((1, [1]), (3, [3, 4]), (-1, [0])):
            with pytest.raises(AssertionError):
                session.add_blocks(first, ids)
        with pytest.raises(AssertionError):
            await session.finish(15)
        await session.abort("test")


@in_virtual_time
async def test_a_store_that_raises_ends_the_session_with_an_error() -> None:
    async with pair() as ends:

        def broken(block_ids: Sequence[int], target: memoryview) -> None:
            raise RuntimeError("the pool is gone")

        ends.store.read_blocks_into = broken  # type: ignore[method-assign]
        session = ends.open(make_ticket(16))
        session.add_blocks(0, range(4))
        error = await failure_of(session.finish(16))
        assert "the pool is gone" in error.message
