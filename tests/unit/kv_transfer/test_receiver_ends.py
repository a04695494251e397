"""Commit, abort and keepalive at the receiver: each is idempotent, what is wrong does nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.errors import StaleEpoch, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import Epoch
from kv_transfer.transport import CommitClaim, Fence
from tests.unit.kv_transfer.doubles import (
    LAYOUT,
    DecodeEnd,
    failure_of,
    in_virtual_time,
    make_ticket,
)
from tests.unit.kv_transfer.receiving import frame_of, offer, push

# ---------------------------------------------------------------- commit, abort, keepalive


async def sent(end: DecodeEnd, num_tokens: int = 14) -> tuple[HandoffTicket, CommitClaim]:
    """A ticket whose blocks have all been pushed in two frames, and the claim that fits."""
    ticket = make_ticket(num_tokens)
    await offer(end, ticket)
    half = ticket.num_blocks // 2
    first, sum_1 = frame_of(ticket, 0, half)
    second, sum_2 = frame_of(ticket, half, ticket.num_blocks - half)
    await push(end, first, second)
    return ticket, CommitClaim(num_tokens, ticket.num_blocks, sum_1 ^ sum_2)


@in_virtual_time
async def test_a_commit_of_all_that_arrived_is_receipted_with_the_bytes_written() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    await asyncio.sleep(0.2)
    receipt = await end.receiver.commit(Fence.of(ticket), claim)
    assert (receipt.num_written_blocks, receipt.num_written_bytes) == (4, 4 * LAYOUT.block_bytes)
    assert end.port.committed == {ticket.ticket_id: (14, 4)}
    assert end.counted("baton_kv_transfer_seconds_sum", transport="loopback") == pytest.approx(0.2)


@pytest.mark.parametrize("field", ["num_tokens", "num_pushed_blocks", "checksum"])
@in_virtual_time
async def test_a_commit_that_claims_something_else_aborts_the_ticket(field: str) -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    wrong = replace(claim, **{field: getattr(claim, field) ^ 1})
    assert isinstance(await failure_of(end.receiver.commit(Fence.of(ticket), wrong)), TransferCorrupt)
    assert end.port.aborted == {ticket.ticket_id: "transfer_corrupt"}
    assert isinstance(await failure_of(end.receiver.commit(Fence.of(ticket), claim)), TicketExpired)
    assert end.port.committed == {}


@in_virtual_time
async def test_a_commit_with_blocks_missing_aborts_the_ticket_even_if_the_claim_fits_what_arrived() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    frame, checksum = frame_of(ticket, 0, 3)
    await push(end, frame)
    error = await failure_of(end.receiver.commit(Fence.of(ticket), CommitClaim(16, 3, checksum)))
    assert isinstance(error, TransferCorrupt)
    assert ticket.ticket_id in end.port.aborted


@in_virtual_time
async def test_a_repeated_commit_commits_once_also_when_the_first_call_broke_off() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    end.port.gate.clear()
    broken = asyncio.create_task(end.receiver.commit(Fence.of(ticket), claim))
    await asyncio.sleep(0.1)
    broken.cancel()
    await asyncio.gather(broken, return_exceptions=True)
    end.port.gate.set()
    receipt = await end.receiver.commit(Fence.of(ticket), claim)
    assert await end.receiver.commit(Fence.of(ticket), claim) == receipt
    assert list(end.port.committed) == [ticket.ticket_id]


@in_virtual_time
async def test_a_keepalive_that_crosses_the_commit_is_harmless() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    await end.receiver.keepalive(Fence.of(ticket))
    assert len(end.port.keepalives) == 1
    await end.receiver.commit(Fence.of(ticket), claim)
    await end.receiver.keepalive(Fence.of(ticket))
    assert len(end.port.keepalives) == 1


@in_virtual_time
async def test_messages_with_a_wrong_sender_epoch_do_nothing() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    forged = replace(Fence.of(ticket), sender_epoch=Epoch(99))
    for call in (
        end.receiver.commit(forged, claim),
        end.receiver.abort(forged, "no", 1.0),
        end.receiver.keepalive(forged),
    ):
        assert isinstance(await failure_of(call), StaleEpoch)
    assert end.port.aborted == {}
    await end.receiver.commit(Fence.of(ticket), claim)


@in_virtual_time
async def test_an_abort_of_an_unknown_ticket_is_answered_and_refuses_a_late_offer() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await end.receiver.abort(Fence.of(ticket), "early", 5.0)
    await end.receiver.abort(Fence.of(ticket), "early", 5.0)
    assert isinstance(await failure_of(offer(end, ticket)), TicketExpired)


@in_virtual_time
async def test_late_frames_after_an_abort_are_refused_as_expired() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    await end.receiver.abort(Fence.of(ticket), "the client left", 5.0)
    (ack,) = await push(end, frame_of(ticket, 0, 2)[0])
    assert isinstance(ack.error, TicketExpired)
    assert isinstance(await failure_of(end.receiver.commit(Fence.of(ticket), claim)), TicketExpired)


@in_virtual_time
async def test_the_table_of_tickets_is_bounded_and_forgets_the_least_recently_used() -> None:
    end = DecodeEnd(num_blocks=4200)
    first = [make_ticket(4) for _ in range(2)]
    for ticket in first:
        await offer(end, ticket)
    for _ in range(4094):
        await offer(end, make_ticket(4))
    await end.receiver.keepalive(Fence.of(first[0]))  # used
    await offer(end, make_ticket(4))
    await end.receiver.keepalive(Fence.of(first[0]))
    assert isinstance(await failure_of(end.receiver.keepalive(Fence.of(first[1]))), TicketExpired)


@in_virtual_time
async def test_closing_leaves_no_task_behind() -> None:
    end = DecodeEnd()
    ticket, claim = await sent(end)
    end.port.gate.clear()
    calls = [
        asyncio.create_task(offer(end, make_ticket(16))),
        asyncio.create_task(end.receiver.commit(Fence.of(ticket), claim)),
    ]
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in calls)
    await end.receiver.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
