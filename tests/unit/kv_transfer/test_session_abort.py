"""However a session ends, both sides are free and no block is read any more, in bounded (virtual) time."""

from __future__ import annotations

import asyncio

from core.errors import (
    Cancelled,
    TransferTimeout,
)
from tests.unit.kv_transfer.doubles import (
    failure_of,
    in_virtual_time,
    make_ticket,
    until,
)
from tests.unit.kv_transfer.session_pair import now, pair

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
