"""Inbox: reservations for KV that arrives from prefill workers, one per ticket.

Owns the decode side of the ticket automaton: who may write into which reserved block and when, when the
blocks become findable, and when they are given back. Does not own sequences: a claim hands the blocks over.
Frames are checked by the receiver before they come here, except that a payload which its writer could still
change is verified here, after the copy. Time comes from a Clock. Used on the step thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.clock import Clock, Deadline
from core.errors import (
    HandoffError,
    InvalidRequest,
    LayoutMismatch,
    ReservationRefused,
    StaleEpoch,
    TicketExpired,
    TransferCorrupt,
)
from core.handoff import HandoffTicket, TicketState, next_state
from core.ids import TicketId, WorkerRef
from decode_worker.config import DecodeConfig
from engine.kv.cache import KVCache
from engine.kv.reservation import Reservation
from kv_transfer.transport import Payload, WriteCheck


class WritableBlocks(Protocol):
    """What the inbox needs of the pool."""

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None: ...


@dataclass(eq=False, slots=True)
class _Arrival:
    """A ticket that is not terminal. `heard_at`: last offer, push or keepalive; `reservation` is None once
    claimed.
    """

    ticket: HandoffTicket
    deadline: Deadline
    heard_at: float
    pushed_at: float
    state: TicketState = TicketState.OFFERED
    reservation: Reservation | None = None
    held: tuple[int, ...] = ()
    written: set[int] = field(default_factory=set)
    committed_at: float = 0.0

    @property
    def num_missing(self) -> int:
        """Blocks that prefill has to send."""
        return self.ticket.num_blocks - len(self.held)


_SWEEP_PERIOD_S = 1.0  # `expire` runs before each step; tombstones are many and in no hurry


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """What became of a ticket, remembered until `until` so that late messages are understood."""

    state: TicketState
    until: float


class Inbox:
    """All tickets of this worker. `on_ended` hears the terminal state of each ticket that ends."""

    def __init__(
        self,
        own_ref: WorkerRef,
        cache: KVCache,
        pool: WritableBlocks,
        config: DecodeConfig,
        clock: Clock,
        on_ended: Callable[[TicketState], None],
    ) -> None:
        self._own_ref = own_ref
        self._cache = cache
        self._pool = pool
        self._config = config
        self._clock = clock
        self._on_ended = on_ended
        self._arrivals: dict[TicketId, _Arrival] = {}
        self._tombstones: dict[TicketId, _Tombstone] = {}
        self._claimers: set[TicketId] = set()
        self._swept_at = clock.now()

    # ------------------------------------------------------------ messages from prefill

    def offer(
        self, ticket: HandoffTicket, time_left_s: float, max_samples: int | None = None
    ) -> tuple[int, ...]:
        """Reserve all blocks of the ticket and room to grow, or refuse; answers the indexes that are held
        here.

        `max_samples`: places for sequences that are left (None: no limit). A repeated offer gets the same
        answer. Raises StaleEpoch, LayoutMismatch, InvalidRequest (the ticket contradicts itself),
        TicketExpired (it has ended, or its abort came first), ReservationRefused (no room).
        """
        known = self._arrivals.get(ticket.ticket_id)
        if known is not None:
            return known.held
        tombstone = self._tombstones.get(ticket.ticket_id)
        if tombstone is not None:
            if tombstone.state is TicketState.RELEASED:
                raise TicketExpired("the ticket was claimed and released", ticket_id=ticket.ticket_id)
            raise TicketExpired(f"the ticket has {tombstone.state} before", ticket_id=ticket.ticket_id)
        self._check(ticket)
        now = self._clock.now()
        arrival = _Arrival(ticket, Deadline(now + time_left_s), heard_at=now, pushed_at=now)
        if max_samples is None or ticket.num_samples <= max_samples:
            arrival.reservation = self._cache.reserve(
                ticket.block_hashes,
                ticket.num_tokens,
                ticket.num_growth_tokens,
                ticket.num_samples,
                ticket.is_prefix_cache_read,
            )
        if arrival.reservation is None:
            arrival.state = next_state(arrival.state, TicketState.ABORTED)
            self._on_ended(arrival.state)
            raise ReservationRefused("no room for the ticket", worker_id=self._own_ref.worker_id)
        arrival.held = arrival.reservation.held
        arrival.state = next_state(arrival.state, TicketState.RESERVED)
        self._arrivals[ticket.ticket_id] = arrival
        return arrival.held

    def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload | bytes,
        check: WriteCheck | None = None,
    ) -> None:
        """Copy blocks into the reservation; a repeated write of written blocks does nothing.

        Without `check` they were verified before; with it they are once they lie in the reserved blocks,
        which nobody reads before the commit. Raises TicketExpired (unknown or ended: nothing is written),
        TransferCorrupt (the blocks are not the ticket's to send, or `check` says that they are not what was
        sent; the ticket is aborted).
        """
        arrival = self._live(ticket_id)
        indexes = range(first_index, first_index + num_blocks)
        if num_blocks > 0 and arrival.written.issuperset(indexes):
            self._hear(arrival, is_push=True)
            return
        if arrival.reservation is None or arrival.state is TicketState.COMMITTED:
            raise TicketExpired("the ticket is committed already", ticket_id=ticket_id)
        if first_index < 0 or num_blocks < 1 or indexes[-1] >= arrival.ticket.num_blocks:
            raise self._corrupt(ticket_id, "pushed blocks lie outside the ticket")
        if any(index in indexes for index in arrival.held):
            raise self._corrupt(ticket_id, "pushed blocks were held here")
        block_ids = [arrival.reservation.table[index] for index in indexes]
        for block_id in block_ids:
            assert self._cache.allocator.is_writable(block_id), f"block {block_id} is shared or published"
        try:
            if isinstance(payload, bytes | memoryview):
                self._pool.write_blocks(block_ids, payload, None if check is None else check.observe)
            else:
                payload.write_to(block_ids)
        except ValueError as error:
            raise self._corrupt(ticket_id, str(error)) from error
        if check is not None and not check.is_right:
            raise self._corrupt(ticket_id, "what arrived in the blocks does not match its checksum")
        arrival.written.update(indexes)
        if arrival.state is TicketState.RESERVED:
            arrival.state = next_state(arrival.state, TicketState.SENDING)
        self._hear(arrival, is_push=True)

    def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        """All is here: the full blocks become findable and the ticket may be claimed. Repeating it does
        nothing.

        Raises TicketExpired, or TransferCorrupt if the numbers disagree with what arrived (the ticket is
        aborted).
        """
        tombstone = self._tombstones.get(ticket_id)
        if tombstone is not None and tombstone.state is TicketState.RELEASED:
            return
        arrival = self._live(ticket_id)
        if arrival.state in (TicketState.COMMITTED, TicketState.CLAIMED):
            return
        assert arrival.reservation is not None
        if num_tokens != arrival.ticket.num_tokens:
            raise self._corrupt(
                ticket_id, f"committed {num_tokens} tokens, offered {arrival.ticket.num_tokens}"
            )
        if not len(arrival.written) == num_pushed_blocks == arrival.num_missing:
            raise self._corrupt(
                ticket_id,
                f"committed {num_pushed_blocks} blocks of {arrival.num_missing}, {len(arrival.written)} came",
            )
        self._cache.publish_reserved(arrival.reservation)
        arrival.state = next_state(arrival.state, TicketState.COMMITTED)
        arrival.committed_at = self._clock.now()

    def abort(self, ticket_id: TicketId, time_left_s: float | None = None) -> None:
        """End the ticket unless it is claimed; of an unknown one leave a tombstone, so that its late offer
        is refused.
        """
        arrival = self._arrivals.get(ticket_id)
        if arrival is None:
            if ticket_id not in self._tombstones:
                left_s = self._config.tombstone_s if time_left_s is None else time_left_s
                self._bury(ticket_id, TicketState.ABORTED, self._clock.now() + left_s)
        elif arrival.state is not TicketState.CLAIMED:
            self._end(ticket_id, TicketState.ABORTED)

    def abort_all(self) -> None:
        """End all tickets that are not claimed."""
        for ticket_id, arrival in list(self._arrivals.items()):
            if arrival.state is not TicketState.CLAIMED:
                self._end(ticket_id, TicketState.ABORTED)

    def keepalive(self, ticket_id: TicketId) -> None:
        """Prefill lives but has nothing to push. Raises TicketExpired."""
        self._hear(self._live(ticket_id), is_push=False)

    # ------------------------------------------------------------ the claim

    def state(self, ticket_id: TicketId) -> TicketState | None:
        """Where the ticket stands; None if it was never heard of (or long ago)."""
        arrival = self._arrivals.get(ticket_id)
        if arrival is not None:
            return arrival.state
        tombstone = self._tombstones.get(ticket_id)
        return tombstone.state if tombstone is not None else None

    def pushed_at(self, ticket_id: TicketId) -> float | None:
        """When the last blocks (or the offer) of a live ticket came."""
        arrival = self._arrivals.get(ticket_id)
        return arrival.pushed_at if arrival is not None else None

    def expect(self, ticket_id: TicketId) -> None:
        """A Generate waits for the ticket: as long as it does, silence does not end the ticket."""
        self._claimers.add(ticket_id)

    def unexpect(self, ticket_id: TicketId) -> None:
        """Nobody waits any more."""
        self._claimers.discard(ticket_id)

    def claim(self, ticket_id: TicketId) -> Reservation:
        """Hand the blocks of a committed ticket to its sequences; from here on they are the caller's to
        give back.
        """
        arrival = self._arrivals[ticket_id]
        arrival.state = next_state(arrival.state, TicketState.CLAIMED)
        reservation = arrival.reservation
        assert reservation is not None
        arrival.reservation = None
        self._claimers.discard(ticket_id)
        return reservation

    def ticket(self, ticket_id: TicketId) -> HandoffTicket:
        """The live ticket of that name."""
        return self._arrivals[ticket_id].ticket

    def release(self, ticket_id: TicketId) -> None:
        """The sequences of a claimed ticket have ended."""
        assert self._arrivals[ticket_id].state is TicketState.CLAIMED
        self._end(ticket_id, TicketState.RELEASED)

    # ------------------------------------------------------------ time

    def expire(self) -> None:
        """End what nobody speaks for: silent reservations, unclaimed commits, tickets past their deadline."""
        now = self._clock.now()
        for ticket_id in [
            key for key, arrival in self._arrivals.items() if self._is_overdue(key, arrival, now)
        ]:
            self._end(ticket_id, TicketState.EXPIRED)
        if now - self._swept_at >= _SWEEP_PERIOD_S:
            self._swept_at = now
            for ticket_id in [key for key, tombstone in self._tombstones.items() if now >= tombstone.until]:
                del self._tombstones[ticket_id]

    # ------------------------------------------------------------ accounts

    def tables(self) -> Iterator[tuple[int, ...]]:
        """Blocks held for tickets, for the allocator's check."""
        for arrival in self._arrivals.values():
            if arrival.reservation is not None:
                yield arrival.reservation.block_ids

    @property
    def num_reserved_samples(self) -> int:
        """Sequences that unclaimed tickets will bring."""
        return sum(a.ticket.num_samples for a in self._arrivals.values() if a.reservation is not None)

    @property
    def num_unclaimed(self) -> int:
        return sum(1 for arrival in self._arrivals.values() if arrival.reservation is not None)

    def num_by_state(self) -> Counter[TicketState]:
        """Live tickets by state."""
        return Counter(arrival.state for arrival in self._arrivals.values())

    # ------------------------------------------------------------ inside

    def _check(self, ticket: HandoffTicket) -> None:
        own = self._own_ref
        if (ticket.decode.worker_id, ticket.decode.epoch) != (own.worker_id, own.epoch):
            raise StaleEpoch("the ticket names another worker or incarnation", worker_id=own.worker_id)
        differences = self._cache.layout.differences(ticket.layout)
        if differences:
            raise LayoutMismatch(
                "decode and prefill hold different KV layouts (decode vs prefill): " + "; ".join(differences),
                decode=own.worker_id,
                prefill=ticket.prefill.worker_id,
            )
        num_full = ticket.num_tokens // ticket.layout.block_size
        if ticket.num_tokens < 1 or ticket.num_samples < 1 or ticket.num_growth_tokens < 0:
            raise InvalidRequest("the ticket's counts are not positive", param="ticket")
        if len(ticket.block_hashes) != num_full:
            raise InvalidRequest("the ticket does not name each full block", param="ticket")

    def _live(self, ticket_id: TicketId) -> _Arrival:
        arrival = self._arrivals.get(ticket_id)
        if arrival is None:
            state = self.state(ticket_id)
            raise TicketExpired(f"the ticket is {state or 'unknown'}", ticket_id=ticket_id)
        return arrival

    def _hear(self, arrival: _Arrival, is_push: bool) -> None:
        arrival.heard_at = self._clock.now()
        if is_push:
            arrival.pushed_at = arrival.heard_at

    def _is_overdue(self, ticket_id: TicketId, arrival: _Arrival, now: float) -> bool:
        if arrival.state is TicketState.CLAIMED:
            return False
        if now >= arrival.deadline.at:
            return True
        if ticket_id in self._claimers:
            return False
        if arrival.state is TicketState.COMMITTED:
            return now - arrival.committed_at >= self._config.commit_claim_s
        return now - arrival.heard_at >= self._config.reservation_silence_s

    def _corrupt(self, ticket_id: TicketId, message: str) -> HandoffError:
        self._end(ticket_id, TicketState.ABORTED)
        return TransferCorrupt(message, ticket_id=ticket_id)

    def _end(self, ticket_id: TicketId, state: TicketState) -> None:
        arrival = self._arrivals.pop(ticket_id)
        arrival.state = next_state(arrival.state, state)
        if arrival.reservation is not None:
            self._cache.abandon(arrival.reservation)
        self._bury(ticket_id, state, max(arrival.deadline.at, self._clock.now() + self._config.tombstone_s))
        self._on_ended(state)

    def _bury(self, ticket_id: TicketId, state: TicketState, until: float) -> None:
        self._tombstones[ticket_id] = _Tombstone(state, until)
        while len(self._tombstones) > self._config.max_tombstones:
            del self._tombstones[next(iter(self._tombstones))]
