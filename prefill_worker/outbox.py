"""Outbox: the leases of this worker: blocks that stay held because a ticket still sends them.

Owned by the step thread; no tensors, no I/O, time is an argument. A lease takes a hold of its own on each
block given to the bridge, so the sequence may go at any time and the bytes stay. A ticket's end and the end
of its reading are two things: blocks go back only when nobody reads them any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.errors import Cancelled, InvalidRequest
from core.handoff import TERMINAL_STATES, HandoffTicket, TicketState, may_follow, next_state
from core.ids import TicketId

ENDED_STATES = (TicketState.COMMITTED, TicketState.ABORTED, TicketState.EXPIRED)
"""The states in which a ticket ends for prefill; what follows COMMITTED is decode's affair."""

_FORGET_PERIOD_S = 1.0


class BlockHolder(Protocol):
    """What a lease needs of the allocator."""

    def hold(self, block_ids: Sequence[int]) -> None: ...

    def release(self, block_ids: Sequence[int]) -> None: ...


@dataclass(eq=False, slots=True)
class Lease:
    """One ticket's blocks in order. `is_sealed`: all are here, nothing is left to compute."""

    ticket: HandoffTicket
    deadline_at: float
    state: TicketState = TicketState.OFFERED
    block_table: list[int] = field(default_factory=list)
    is_sealed: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state is TicketState.COMMITTED or self.state in TERMINAL_STATES


class Outbox:
    """All leases by ticket.

    Every message may come twice or late: a transition that the automaton forbids changes nothing.
    """

    def __init__(self, allocator: BlockHolder, memory_s: float = 60.0) -> None:
        self._allocator = allocator
        self._memory_s = memory_s
        self._leases: dict[TicketId, Lease] = {}
        self._past: dict[TicketId, float] = {}
        self._cancelled: set[TicketId] = set()
        self._forget_at = float("-inf")
        self.num_ended: Counter[TicketState] = Counter()

    def check_new(self, ticket_id: TicketId, now: float) -> None:
        """Raise InvalidRequest if `ticket_id` was used here, Cancelled if it was cancelled before it came."""
        is_past = self._past.get(ticket_id, now) > now
        if is_past and ticket_id in self._cancelled:
            raise Cancelled("the ticket was cancelled before its prefill came")
        if is_past or ticket_id in self._leases:
            raise InvalidRequest("the ticket id was used before", param="ticket_id")

    def open(self, ticket: HandoffTicket, deadline_at: float) -> None:
        """A lease without blocks, OFFERED."""
        assert ticket.ticket_id not in self._leases, "a ticket is opened once"
        self._leases[ticket.ticket_id] = Lease(ticket, deadline_at)

    def grant(self, ticket_id: TicketId) -> None:
        """Decode has reserved room."""
        lease = self._advance(ticket_id, TicketState.RESERVED)
        if lease is not None and lease.block_table:
            self._advance(ticket_id, TicketState.SENDING)

    def add_blocks(self, ticket_id: TicketId, block_ids: Sequence[int], is_last: bool = False) -> None:
        """Hold the ticket's next blocks until its reading ends: full ones, and with `is_last` the tail."""
        lease = self._leases[ticket_id]
        assert not lease.has_ended, "an ended ticket takes no more blocks"
        assert not lease.is_sealed, "all blocks of the ticket are leased already"
        self._allocator.hold(block_ids)
        lease.block_table.extend(block_ids)
        lease.is_sealed = is_last
        if is_last:
            assert len(lease.block_table) == lease.ticket.num_blocks
        self._advance(ticket_id, TicketState.SENDING)

    def end(self, ticket_id: TicketId, state: TicketState) -> bool:
        """The ticket ends as COMMITTED or ABORTED; False when it is unknown or had ended before."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.has_ended:
            return False
        if self._advance(ticket_id, state) is None:
            return False
        self.num_ended[state] += 1
        return True

    def close(self, ticket_id: TicketId, now: float) -> None:
        """Nobody reads the blocks any more: they go back and the ticket is forgotten, all but its name."""
        lease = self._leases.pop(ticket_id, None)
        if lease is None:
            return
        assert lease.has_ended, "a lease is closed after its ticket has ended"
        self._allocator.release(lease.block_table)
        self._past[ticket_id] = max(lease.deadline_at, now + self._memory_s)

    def remember(self, ticket_id: TicketId, until: float, is_cancelled: bool = False) -> None:
        """Refuse a prefill of `ticket_id` until then: one was admitted, or its cancellation came first."""
        self._past[ticket_id] = until
        if is_cancelled:
            self._cancelled.add(ticket_id)

    def expire(self, now: float) -> list[TicketId]:
        """Tickets whose deadline has passed: they end now as EXPIRED; whoever reads them has to stop."""
        if now >= self._forget_at:
            self._forget(now)
        late = [
            name for name, lease in self._leases.items() if not lease.has_ended and now >= lease.deadline_at
        ]
        for ticket_id in late:
            self.end(ticket_id, TicketState.EXPIRED)
        return late

    def has_ended(self, ticket_id: TicketId) -> bool:
        """Whether the ticket takes no more blocks; true also when it is unknown."""
        lease = self._leases.get(ticket_id)
        return lease is None or lease.has_ended

    def state(self, ticket_id: TicketId) -> TicketState | None:
        lease = self._leases.get(ticket_id)
        return None if lease is None else lease.state

    def tables(self) -> list[list[int]]:
        """The block tables of all leases, for the allocator's check."""
        return [lease.block_table for lease in self._leases.values()]

    def num_by_state(self) -> dict[TicketState, int]:
        """How many leases are in each state (zero included)."""
        counts = dict.fromkeys(TicketState, 0)
        for lease in self._leases.values():
            counts[lease.state] += 1
        return counts

    def __len__(self) -> int:
        return len(self._leases)

    def _forget(self, now: float) -> None:
        """Names whose time is over; now and then, since there may be thousands."""
        self._forget_at = now + _FORGET_PERIOD_S
        for ticket_id in [name for name, until in self._past.items() if until <= now]:
            del self._past[ticket_id]
            self._cancelled.discard(ticket_id)

    def _advance(self, ticket_id: TicketId, following: TicketState) -> Lease | None:
        lease = self._leases.get(ticket_id)
        if lease is None or not may_follow(lease.state, following):
            return None
        lease.state = next_state(lease.state, following)
        return lease
