"""Borrowed: room for blocks that a decode worker lends, from its offer until they are cached here.

Owns the receiving side of the ticket automaton on a prefill worker. Nobody claims these tickets: with a
verified commit the blocks become findable, are let go of, and wait in the cache for the prompt that follows.
Frames are checked by the receiver before they come here, except that a payload which its writer could still
change is verified here, after the copy. Used on the step thread; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.errors import HandoffError, InvalidRequest, ReservationRefused, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket, TicketState, next_state
from core.ids import TicketId, WorkerId
from engine.kv.cache import KVCache
from engine.kv.reservation import Reservation
from kv_transfer.transport import Payload, WriteCheck

_TOMBSTONE_S = 60.0
_MAX_TOMBSTONES = 4096


class WritableBlocks(Protocol):
    """What is needed of the pool."""

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None: ...


@dataclass(eq=False, slots=True)
class _Arrival:
    """A ticket that is not terminal; `heard_at`: last offer, push or keepalive."""

    ticket: HandoffTicket
    reservation: Reservation
    deadline_at: float
    heard_at: float
    state: TicketState = TicketState.RESERVED
    written: set[int] = field(default_factory=set)


class Borrowed:
    """By ticket. Every message may come twice, late, or before the one that it follows."""

    def __init__(self, own_id: WorkerId, cache: KVCache, pool: WritableBlocks, silence_s: float) -> None:
        self._own_id = own_id
        self._cache = cache
        self._pool = pool
        self._silence_s = silence_s
        self._arrivals: dict[TicketId, _Arrival] = {}
        self._past: dict[TicketId, tuple[TicketState, float]] = {}

    def offer(self, ticket: HandoffTicket, time_left_s: float, now: float) -> tuple[int, ...]:
        """Room for the ticket's blocks, or a refusal; answers the indexes of those that are cached here.

        A repeated offer gets the same answer. Raises InvalidRequest (not a ticket of full blocks),
        TicketExpired (it has ended, or its abort came first), ReservationRefused.
        """
        known = self._arrivals.get(ticket.ticket_id)
        if known is not None:
            return known.reservation.held
        if ticket.ticket_id in self._past:
            state, _ = self._past[ticket.ticket_id]
            raise TicketExpired(f"the ticket has {state} before", ticket_id=ticket.ticket_id)
        num_full, num_tail = divmod(ticket.num_tokens, ticket.layout.block_size)
        if num_tail or num_full < 1 or len(ticket.block_hashes) != num_full:
            raise InvalidRequest("only full blocks with their names are lent", param="ticket")
        reservation = self._cache.reserve(ticket.block_hashes, ticket.num_tokens)
        if reservation is None:
            raise ReservationRefused("no room for borrowed blocks", worker_id=self._own_id)
        self._arrivals[ticket.ticket_id] = _Arrival(ticket, reservation, now + time_left_s, heard_at=now)
        return reservation.held

    def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload | bytes,
        check: WriteCheck | None,
        now: float,
    ) -> None:
        """Copy blocks into their room; a repeated write does nothing. Raises TicketExpired, or
        TransferCorrupt (the ticket is aborted).
        """
        arrival = self._live(ticket_id)
        arrival.heard_at = now
        indexes = range(first_index, first_index + num_blocks)
        if num_blocks > 0 and arrival.written.issuperset(indexes):
            return
        if first_index < 0 or num_blocks < 1 or indexes[-1] >= arrival.ticket.num_blocks:
            raise self._corrupt(ticket_id, "pushed blocks lie outside the ticket", now)
        if any(index in indexes for index in arrival.reservation.held):
            raise self._corrupt(ticket_id, "pushed blocks were held here", now)
        block_ids = [arrival.reservation.table[index] for index in indexes]
        for block_id in block_ids:
            assert self._cache.allocator.is_writable(block_id), f"block {block_id} is shared or published"
        try:
            if isinstance(payload, bytes | memoryview):
                self._pool.write_blocks(block_ids, payload, None if check is None else check.observe)
            else:
                payload.write_to(block_ids)
        except ValueError as error:
            raise self._corrupt(ticket_id, str(error), now) from error
        if check is not None and not check.is_right:
            raise self._corrupt(ticket_id, "what arrived in the blocks does not match its checksum", now)
        arrival.written.update(indexes)
        if arrival.state is TicketState.RESERVED:
            arrival.state = next_state(arrival.state, TicketState.SENDING)

    def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int, now: float) -> None:
        """All is here: the blocks are findable from now on, and nobody's. Repeating it does nothing. Raises
        TicketExpired or TransferCorrupt.
        """
        if self._past.get(ticket_id, (None, 0.0))[0] is TicketState.RELEASED:
            return
        arrival = self._live(ticket_id)
        ticket, reservation = arrival.ticket, arrival.reservation
        num_missing = ticket.num_blocks - len(reservation.held)
        if num_tokens != ticket.num_tokens or not len(arrival.written) == num_pushed_blocks == num_missing:
            raise self._corrupt(ticket_id, "the commit is not of what was offered and came", now)
        self._cache.publish_reserved(reservation)
        arrival.state = next_state(next_state(arrival.state, TicketState.COMMITTED), TicketState.CLAIMED)
        self._end(ticket_id, TicketState.RELEASED, now)

    def abort(self, ticket_id: TicketId, now: float) -> None:
        """End the ticket; of an unknown one remember it, so that its late offer is refused."""
        if ticket_id in self._arrivals:
            self._end(ticket_id, TicketState.ABORTED, now)
        elif ticket_id not in self._past:
            self._bury(ticket_id, TicketState.ABORTED, now, now)

    def abort_all(self, now: float) -> None:
        for ticket_id in list(self._arrivals):
            self._end(ticket_id, TicketState.ABORTED, now)

    def keepalive(self, ticket_id: TicketId, now: float) -> None:
        """The lender lives but has nothing to push. Raises TicketExpired."""
        self._live(ticket_id).heard_at = now

    def expire(self, now: float) -> None:
        """End what nobody speaks for, and what is too late."""
        for ticket_id, arrival in list(self._arrivals.items()):
            if now >= min(arrival.deadline_at, arrival.heard_at + self._silence_s):
                self._end(ticket_id, TicketState.EXPIRED, now)

    def tables(self) -> Iterator[tuple[int, ...]]:
        """Blocks held for tickets, for the allocator's check."""
        return (arrival.reservation.block_ids for arrival in self._arrivals.values())

    def __len__(self) -> int:
        return len(self._arrivals)

    # ------------------------------------------------------------ inside

    def _live(self, ticket_id: TicketId) -> _Arrival:
        arrival = self._arrivals.get(ticket_id)
        if arrival is None:
            state, _ = self._past.get(ticket_id, ("unknown", 0.0))
            raise TicketExpired(f"the ticket is {state}", ticket_id=ticket_id)
        return arrival

    def _corrupt(self, ticket_id: TicketId, message: str, now: float) -> HandoffError:
        self._end(ticket_id, TicketState.ABORTED, now)
        return TransferCorrupt(message, ticket_id=ticket_id)

    def _end(self, ticket_id: TicketId, state: TicketState, now: float) -> None:
        arrival = self._arrivals.pop(ticket_id)
        next_state(arrival.state, state)
        self._cache.abandon(arrival.reservation)
        self._bury(ticket_id, state, now, max(now, arrival.deadline_at))

    def _bury(self, ticket_id: TicketId, state: TicketState, now: float, until: float) -> None:
        """Oldest first out: those whose time is over, and those that are too many."""
        self._past[ticket_id] = (state, until + _TOMBSTONE_S)
        while self._past:
            oldest = next(iter(self._past))
            if len(self._past) <= _MAX_TOMBSTONES and self._past[oldest][1] > now:
                return
            del self._past[oldest]
