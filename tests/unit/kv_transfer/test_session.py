"""A session hands all blocks over, or ends on both sides with a typed error in bounded (virtual) time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import (
    Cancelled,
    LayoutMismatch,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    TicketExpired,
    TransferCorrupt,
    TransferTimeout,
    WorkerDraining,
    WorkerLost,
)
from core.handoff import HandoffTicket
from core.ids import Epoch, TicketId
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.session import SendSession
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
    quick,
    until,
)

CONFIG = BridgeConfig(frame_bytes=2 * LAYOUT.block_bytes, max_bytes_in_flight=6 * LAYOUT.block_bytes)


@dataclass
class Pair:
    decode: DecodeEnd
    sender: Sender
    store: ByteStore
    transport: TroubledTransport
    registry: CollectorRegistry

    def open(self, ticket: HandoffTicket, left_s: float = 60.0) -> SendSession:
        return self.sender.open(ticket, Deadline.after(left_s, LoopClock()))

    def arrived(self, ticket: HandoffTicket, indexes: Sequence[int]) -> bool:
        port = self.decode.port
        return all(port.block(ticket.ticket_id, index) == self.store.block(index) for index in indexes)

    def failures(self, code: str) -> float:
        labels = {"side": "sender", "code": code}
        return self.registry.get_sample_value("baton_kv_transfer_failures_total", labels) or 0.0


@asynccontextmanager
async def pair(held: Sequence[int] = (), config: BridgeConfig = CONFIG) -> AsyncIterator[Pair]:
    decode, registry, store = DecodeEnd(held=held), CollectorRegistry(), ByteStore(64, seed=9)
    transport = TroubledTransport(decode.directory.connect(decode.ref))
    sender = Sender(store, PREFILL, lambda ref: transport, LoopClock(), TransferMetrics(registry), config)
    try:
        yield Pair(decode, sender, store, transport, registry)
    finally:
        await sender.close()
        await decode.receiver.close()
    assert transport.is_closed or transport.num_offers == 0
    assert sender.num_sessions == 0


def now() -> float:
    return asyncio.get_running_loop().time()


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


# ---------------------------------------------------------------- broken connections


@in_virtual_time
async def test_a_broken_stream_is_replaced_and_what_was_not_acknowledged_is_sent_again() -> None:
    async with pair() as ends:
        ends.transport.max_frames_a_stream = 2
        ticket = make_ticket(80)
        session = ends.open(ticket)
        session.add_blocks(0, range(20))
        receipt = await session.finish(80)
        assert ends.transport.num_streams >= 5
        assert ends.arrived(ticket, range(20))
        assert receipt.num_pushed_blocks == 20
        counted = ends.decode.counted("baton_kv_transfer_bytes_total", transport="loopback")
        assert counted == 20 * LAYOUT.block_bytes


@in_virtual_time
async def test_a_short_outage_is_survived() -> None:
    async with pair() as ends:
        ticket = make_ticket(80)
        session = ends.open(ticket)
        await session.offered()
        ends.transport.is_down = True
        session.add_blocks(0, range(20))
        await asyncio.sleep(3)
        ends.transport.is_down = False
        await session.finish(80)
        assert ends.arrived(ticket, range(20))


@in_virtual_time
async def test_an_outage_longer_than_the_bounded_silence_ends_the_session() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        session.add_blocks(0, range(4))
        await asyncio.sleep(2)
        ends.transport.is_down = True
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert 4.0 <= now() - started <= 5.1
        assert ends.failures("transfer_timeout") == 1


@in_virtual_time
async def test_a_peer_that_answers_nothing_ends_the_session_after_the_bounded_silence() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.transport.is_silent = True
        session.add_blocks(0, range(4))
        started = now()
        assert isinstance(await failure_of(session.finish(80)), TransferTimeout)
        assert now() - started <= 5.1
        await session.abort("gone")
        assert now() - started <= 7.2


@in_virtual_time
async def test_waiting_for_room_that_other_tickets_have_is_no_silence() -> None:
    async with pair() as ends:
        ticket = make_ticket(80)
        session = ends.open(ticket)
        await session.offered()
        ends.transport.has_room.clear()
        session.add_blocks(0, range(20))
        await asyncio.sleep(30)
        assert session.error is None
        ends.transport.has_room.set()
        await session.finish(80)
        assert ends.arrived(ticket, range(20))


@in_virtual_time
async def test_a_peer_that_is_gone_while_room_is_waited_for_ends_the_session() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.transport.has_room.clear()
        session.add_blocks(0, range(4))
        await asyncio.sleep(10)
        ends.transport.is_silent = True
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= 5.1


@in_virtual_time
async def test_an_offer_that_is_never_answered_ends_after_the_bounded_silence() -> None:
    async with pair() as ends:
        ends.transport.is_silent = True
        session = ends.open(make_ticket(16))
        started = now()
        assert isinstance(await failure_of(session.offered()), TransferTimeout)
        assert now() - started <= 5.1


@in_virtual_time
async def test_an_offer_whose_connection_breaks_is_a_lost_worker_and_decode_is_told_to_abort() -> None:
    async with pair() as ends:
        ends.transport.is_down = True
        session = ends.open(make_ticket(16))
        assert isinstance(await failure_of(session.offered()), WorkerLost)
        await until(lambda: ends.transport.num_aborts == 1)


@in_virtual_time
async def test_decode_that_answers_keepalives_but_writes_nothing_is_given_up() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.decode.port.gate.clear()
        session.add_blocks(0, range(4))
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= 6.1
        assert len(ends.decode.port.keepalives) >= 4


@in_virtual_time
async def test_a_commit_whose_reply_is_lost_is_repeated_and_commits_once() -> None:
    async with pair() as ends:
        ends.transport.lost_commits = 2
        ticket = make_ticket(16)
        session = ends.open(ticket)
        session.add_blocks(0, range(4))
        receipt = await session.finish(16)
        assert receipt.num_pushed_blocks == 4
        assert ends.decode.port.committed == {ticket.ticket_id: (16, 4)}


@pytest.mark.parametrize("left_s", [0.0, 0.5, 3.0])
@in_virtual_time
async def test_the_deadline_bounds_everything(left_s: float) -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16), left_s)
        started = now()
        session.add_blocks(0, [0])
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= left_s + 0.01


# ---------------------------------------------------------------- abort


@in_virtual_time
async def test_an_abort_frees_decode_ends_all_waits_and_may_be_repeated() -> None:
    async with pair() as ends:
        ticket = make_ticket(80)
        session = ends.open(ticket)
        await session.offered()
        session.add_blocks(0, range(4))
        waiting = asyncio.create_task(session.ended())
        await asyncio.sleep(0.01)
        await asyncio.gather(session.abort("left"), session.abort("left again"))
        assert isinstance(await waiting, Cancelled)
        assert isinstance(await failure_of(session.finish(80)), Cancelled)
        assert ends.decode.port.aborted == {ticket.ticket_id: "left"}
        await session.abort("and again")
        assert ends.transport.num_aborts == 1
        assert await session.offered() == ()


@in_virtual_time
async def test_an_abort_before_the_offer_was_sent_leaves_a_tombstone_and_ends_all_waits() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket)
        await session.abort("left")
        assert isinstance(await failure_of(session.offered()), Cancelled)
        assert isinstance(await failure_of(session.finish(16)), Cancelled)
        assert ends.decode.port.aborted == {ticket.ticket_id: "left"}


@in_virtual_time
async def test_an_abort_while_the_offer_waits_for_decode_frees_what_the_offer_would_reserve() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        ends.decode.port.gate.clear()
        session = ends.open(ticket)
        await asyncio.sleep(0.1)
        await session.abort("left")
        ends.decode.port.gate.set()
        await asyncio.sleep(0.1)
        assert isinstance(await failure_of(session.offered()), Cancelled)
        assert ticket.ticket_id not in ends.decode.port.tables


@in_virtual_time
async def test_an_abort_after_the_commit_still_tells_decode() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket)
        session.add_blocks(0, range(4))
        receipt = await session.finish(16)
        await session.abort("left")
        assert ends.decode.port.aborted == {ticket.ticket_id: "left"}
        assert await session.finish(16) == receipt


@in_virtual_time
async def test_an_abort_returns_in_bounded_time_when_decode_answers_nothing() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16))
        await session.offered()
        ends.transport.is_silent = True
        started = now()
        await session.abort("left")
        assert now() - started <= 2.1


@in_virtual_time
async def test_a_cancelled_wait_leaves_the_session_running() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket)
        await session.offered()
        ends.decode.port.gate.clear()
        session.add_blocks(0, range(4))
        waiting = asyncio.create_task(session.finish(16))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        ends.decode.port.gate.set()
        await session.finish(16)
        assert ends.arrived(ticket, range(4))


@in_virtual_time
async def test_after_the_end_no_block_is_read() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        session.add_blocks(0, range(10))
        await session.abort("left")
        num_read = len(ends.store.blocks_read)
        session.add_blocks(10, range(10, 20))
        await asyncio.sleep(10)
        assert len(ends.store.blocks_read) == num_read


@in_virtual_time
async def test_closing_the_sender_aborts_what_runs_and_leaves_no_task() -> None:
    async with pair() as ends:
        tickets = [make_ticket(16) for _ in range(3)]
        sessions = [ends.open(ticket) for ticket in tickets]
        await sessions[0].offered()
        assert ends.sender.num_sessions == 3
        await ends.sender.close()
        assert set(ends.decode.port.aborted) == {ticket.ticket_id for ticket in tickets}
        assert all(isinstance(session.error, Cancelled) for session in sessions)


@in_virtual_time
async def test_a_session_that_failed_tells_decode_before_its_silence_rule_would() -> None:
    async with pair() as ends:
        ticket = make_ticket(16)
        session = ends.open(ticket, left_s=1.0)
        await session.offered()
        assert isinstance(await session.ended(), TransferTimeout)
        await until(lambda: ticket.ticket_id in ends.decode.port.aborted, 0.1)


# ---------------------------------------------------------------- anything


@quick
@given(st.data())
def test_under_random_trouble_all_arrives_or_the_failure_is_typed_and_decode_is_free(
    draw: st.DataObject,
) -> None:
    num_blocks = draw.draw(st.integers(1, 24))
    held = sorted(draw.draw(st.sets(st.integers(0, num_blocks - 1))))
    # (seconds, what happens then)
    troubles = draw.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.01, 0.2, 1.5, 6.0]),
                st.sampled_from(["down", "up", "slow", "fast", "break", "corrupt", "abort"]),
            ),
            max_size=6,
        )
    )
    chunks = draw.draw(st.lists(st.integers(1, 8), min_size=24, max_size=24))

    @in_virtual_time
    async def run() -> None:
        async with pair(held) as ends:
            ticket = make_ticket(num_blocks * LAYOUT.block_size)
            session = ends.open(ticket, left_s=20.0)

            async def compute() -> None:
                done = 0
                for size in chunks:
                    ids = range(done, min(done + size, num_blocks))
                    if ids:
                        session.add_blocks(done, ids)
                    done = ids.stop
                    await asyncio.sleep(0.1)
                await session.finish(ticket.num_tokens)

            async def disturb() -> None:
                for pause, trouble in troubles:
                    await asyncio.sleep(pause)
                    if trouble in ("down", "up"):
                        ends.transport.is_down = trouble == "down"
                    elif trouble == "slow":
                        ends.decode.port.gate.clear()
                    elif trouble == "fast":
                        ends.decode.port.gate.set()
                    elif trouble == "break":
                        ends.transport.max_frames_a_stream = 1
                    elif trouble == "corrupt":
                        ends.transport.alter = lambda frame: frame[:80] + bytes([frame[80] ^ 1]) + frame[81:]
                    else:
                        await session.abort("trouble")

            started = now()
            disturbing = asyncio.create_task(disturb())
            with suppress(ServingError):
                await compute()
            assert now() - started <= 22.0
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            ends.transport.is_down = False
            ends.decode.port.gate.set()
            error = session.error
            missing = [index for index in range(num_blocks) if index not in held]
            if error is None and ticket.ticket_id not in ends.decode.port.aborted:
                assert ends.arrived(ticket, missing)
                assert ends.decode.port.committed == {ticket.ticket_id: (ticket.num_tokens, len(missing))}
            await session.abort("over")
            await session.abort("over")  # the first may have joined one whose time ran out while all was down
            assert ticket.ticket_id not in ends.decode.port.tables
        assert ends.sender.num_sessions == 0

    run()


def test_the_settings_of_the_bridge_are_checked() -> None:
    for wrong in (
        {"frame_bytes": 0},
        {"max_bytes_in_flight": 0},
        {"keepalive_s": 6.0},
        {"keepalive_s": 0.0},
        {"reconnect_min_s": 1.0},
        {"abort_s": 0.0},
    ):
        with pytest.raises(ValueError):
            BridgeConfig(**wrong)
