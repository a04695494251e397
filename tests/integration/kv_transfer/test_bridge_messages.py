"""Messages that come twice, late, from another incarnation, or that claim what did not arrive."""

from __future__ import annotations

from dataclasses import replace

from core.errors import StaleEpoch, TicketExpired, TransferCorrupt
from core.ids import new_epoch
from kv_transfer.transport import CommitClaim, Fence
from tests.integration.kv_transfer.bridge import Run, blocks_of, bridge, checksum_of, push_runs
from tests.integration.kv_transfer.ends import LAYOUT
from tests.unit.kv_transfer.doubles import failure_of, make_ticket


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
