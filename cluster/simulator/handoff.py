"""Handoff: a ticket's way from a prefill worker to a decode worker in virtual time.

Owns the messages of `kv_transfer` and when they arrive: offer, pushes at the price of the link, commit,
abort, keepalives. The tickets themselves are the real outbox's and inbox's. One thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cluster.simulator.events import Events, SiteClock
from cluster.simulator.site_steps import SiteSteps
from cluster.simulator.step_price import LinkPrice
from core.errors import HandoffError, ServingError
from core.handoff import HandoffTicket, TicketState
from decode_worker.decode_loop import DecodeLoop

_KEEPALIVE_S = 1.0
_NO_BYTES = b""


@dataclass(eq=False, slots=True)
class Port:
    """One worker's end of the network: busy in one direction until `free_at`."""

    free_at: float = 0.0


class Receiving(Protocol):
    """The decode worker of a handoff."""

    loop: DecodeLoop
    clock: SiteClock
    steps: SiteSteps
    inward: Port


class Sending(Protocol):
    """The prefill worker's side, told at the moment things happen."""

    def granted(self) -> None: ...

    def refused(self, error: ServingError) -> None:
        """The handoff failed; `closed` follows."""
        ...

    def closed(self, state: TicketState) -> None:
        """Nobody reads the ticket's blocks any more."""
        ...


class Handoff:
    """One per ticket. `outward`: the prefill worker's end of the network."""

    def __init__(
        self,
        ticket: HandoffTicket,
        time_left_s: float,
        sender: Sending,
        outward: Port,
        target: Receiving,
        link: LinkPrice,
        events: Events,
    ) -> None:
        self._ticket = ticket
        self._deadline_at = events.now() + time_left_s
        self._sender = sender
        self._outward = outward
        self._target = target
        self._link = link
        self._events = events
        self._waiting: list[tuple[int, int]] = []
        self._num_held = 0
        self._num_pushed = 0
        self._num_unwritten = 0  # pushes that are not acknowledged
        self._is_granted = False
        self._is_computed = False
        self._is_over = False

    # ------------------------------------------------------------ the prefill side

    def begin(self, when: float) -> None:
        """The first chunk is scheduled at `when`."""
        self._tell(when, self._offer)
        self._events.at(when + _KEEPALIVE_S, self._keep_alive)

    def add_blocks(self, first_index: int, num_blocks: int) -> None:
        """They hold their final content now."""
        if self._is_over:
            return
        if self._is_granted:
            self._push(first_index, num_blocks)
        else:
            self._waiting.append((first_index, num_blocks))

    def finish(self) -> None:
        """All blocks are added."""
        self._is_computed = True
        self._commit_when_written()

    def stop(self, reason: str) -> None:
        """End the ticket unless it has ended."""
        if self._is_over:
            return
        self._is_over = True
        left_s = max(0.0, self._deadline_at - self._events.now())
        self._tell(
            self._events.now(), lambda: self._target.loop.abort(self._ticket.ticket_id, reason, left_s)
        )
        self._sender.closed(TicketState.ABORTED)

    # ------------------------------------------------------------ the decode side

    def _offer(self) -> None:
        left_s = max(0.0, self._deadline_at - self._target.clock.at)
        try:
            held = self._target.loop.offer(self._ticket, left_s)
        except ServingError as error:
            self._answer(partial(self._fail, error))
        else:
            self._answer(lambda: self._granted(len(held)))

    def _write(self, first_index: int, num_blocks: int) -> None:
        ticket_id, loop = self._ticket.ticket_id, self._target.loop
        if self._try(lambda: loop.write(ticket_id, first_index, num_blocks, _NO_BYTES)):
            self._answer(self._written)

    def _commit(self) -> None:
        ticket = self._ticket
        if self._try(lambda: self._target.loop.commit(ticket.ticket_id, ticket.num_tokens, self._num_pushed)):
            self._answer(self._committed)

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except HandoffError as error:
            self._answer(partial(self._fail, error))
            return False
        return True

    # ------------------------------------------------------------ between them

    def _granted(self, num_held: int) -> None:
        if self._is_over:
            return
        self._is_granted = True
        self._num_held = num_held
        self._sender.granted()
        waiting, self._waiting = self._waiting, []
        for first_index, num_blocks in waiting:
            self._push(first_index, num_blocks)
        self._commit_when_written()

    def _push(self, first_index: int, num_blocks: int) -> None:
        end = first_index + num_blocks
        first_index = max(first_index, self._num_held)
        num_blocks = end - first_index
        if num_blocks <= 0:
            return
        outward, inward = self._outward, self._target.inward
        begin_at = max(self._events.now(), outward.free_at, inward.free_at)
        end_at = begin_at + num_blocks * self._ticket.layout.block_bytes / self._link.bytes_per_s
        outward.free_at = inward.free_at = end_at
        self._num_pushed += num_blocks
        self._num_unwritten += 1
        self._tell(end_at, self._write, first_index, num_blocks)

    def _written(self) -> None:
        self._num_unwritten -= 1
        self._commit_when_written()

    def _commit_when_written(self) -> None:
        if self._is_granted and self._is_computed and self._num_unwritten == 0 and not self._is_over:
            self._tell(self._events.now(), self._commit)

    def _committed(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._sender.closed(TicketState.COMMITTED)

    def _fail(self, error: ServingError) -> None:
        if not self._is_over:
            self._sender.refused(error)
            self.stop(error.code)

    def _keep_alive(self) -> None:
        if self._is_over:
            return
        if self._is_granted:
            self._tell(
                self._events.now(),
                lambda: self._try(lambda: self._target.loop.keepalive(self._ticket.ticket_id)),
            )
        self._events.after(_KEEPALIVE_S, self._keep_alive)

    def _tell(self, when: float, act: Callable[..., object], *arguments: int) -> None:
        """A message to decode, sent at `when`."""
        self._target.steps.post(when + self._link.latency_s, act, *arguments)

    def _answer(self, act: Callable[[], object]) -> None:
        """A message back, sent when decode's step thread has done what it was told."""
        self._events.at(self._target.clock.at + self._link.latency_s, act)
