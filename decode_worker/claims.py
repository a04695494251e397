"""Claims: Generates that wait for their ticket, and what becomes of both.

Owns who waits for which ticket and for how long, and the way from a committed ticket to running sequences;
without one, to a prefill here. Reservations are the inbox's, sequences those of the generations. Used on the
step thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from core.clock import Clock
from core.errors import Overloaded, ServingError
from core.handoff import TicketState
from core.ids import TicketId
from decode_worker.generation import Generation
from decode_worker.generations import Generations
from decode_worker.inbox import Inbox

_log = logging.getLogger(__name__)

LIVE = (TicketState.RESERVED, TicketState.SENDING, TicketState.COMMITTED)


class Claims:
    """`end` ends a job that cannot run. `ticket_wait_s`: a Generate waits that long without seeing a push."""

    def __init__(
        self,
        inbox: Inbox,
        generations: Generations,
        clock: Clock,
        ticket_wait_s: float,
        end: Callable[[Generation, ServingError], None],
    ) -> None:
        self._inbox = inbox
        self._generations = generations
        self._clock = clock
        self._ticket_wait_s = ticket_wait_s
        self._end = end
        self._waiting: dict[TicketId, Generation] = {}

    def __len__(self) -> int:
        """Generates that wait."""
        return len(self._waiting)

    def open(self, generation: Generation) -> None:
        """Let a new job run, or wait for its ticket."""
        ticket_id = generation.job.ticket_id
        if ticket_id is None or ticket_id in self._waiting:
            self._start_here(generation)
        else:
            generation.waiting_since = self._clock.now()
            self._waiting[ticket_id] = generation
            self._inbox.expect(ticket_id)
            self.settle(ticket_id)

    def settle(self, ticket_id: TicketId) -> None:
        """Let the Generate that waits for the ticket go on, if the ticket's fate or the wait is decided."""
        generation = self._waiting.get(ticket_id)
        if generation is None:
            return
        state = self._inbox.state(ticket_id)
        if state is TicketState.COMMITTED:
            self.withdraw(generation)
            self._claim(generation, ticket_id)
        elif state is None or state in LIVE:
            assert generation.waiting_since is not None
            since = max(generation.waiting_since, self._inbox.pushed_at(ticket_id) or 0.0)
            if self._clock.now() - since >= self._ticket_wait_s:
                self._inbox.abort(ticket_id)  # a late Offer or Commit is refused: nobody waits for it
                self.withdraw(generation)
                self._start_here(generation)
        else:
            self.withdraw(generation)
            self._start_here(generation)

    def settle_all(self) -> None:
        """Time may have decided."""
        for ticket_id in list(self._waiting):
            self.settle(ticket_id)

    def withdraw(self, generation: Generation) -> None:
        """The job waits no more, if it did."""
        if generation.waiting_since is None:
            return
        assert generation.job.ticket_id is not None
        generation.waiting_since = None
        del self._waiting[generation.job.ticket_id]
        self._inbox.unexpect(generation.job.ticket_id)

    def release(self, generations: Iterable[Generation]) -> None:
        """Jobs that have ended let go of the tickets they ran on."""
        for generation in generations:
            if generation.claimed is not None:
                self._inbox.release(generation.claimed)
                generation.claimed = None

    # ------------------------------------------------------------ inside

    def _claim(self, generation: Generation, ticket_id: TicketId) -> None:
        sequences = self._generations.match_ticket(generation, self._inbox.ticket(ticket_id))
        if not sequences:
            _log.warning("ticket %s does not carry the KV of the request that claims it", ticket_id)
            self._inbox.abort(ticket_id)
            self._start_here(generation)
            return
        generation.claimed = ticket_id
        reservation = self._inbox.claim(ticket_id)
        try:
            self._generations.start_claimed(generation, sequences, reservation)
        except Overloaded as error:
            self._end(generation, error)

    def _start_here(self, generation: Generation) -> None:
        try:
            self._generations.start_here(generation)
        except Overloaded as error:
            self._end(generation, error)
