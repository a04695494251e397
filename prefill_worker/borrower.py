"""Borrower: the port of a prefill worker's receiver: what decode workers lend goes to the step thread.

Owns nothing but the way there, and that a draining worker borrows nothing more. Lives on the IO loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from core.clock import Clock
from core.errors import WorkerDraining
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerId
from kv_transfer.transport import Payload, WriteCheck
from prefill_worker.borrowed import Borrowed

T = TypeVar("T")


class CallOnSteps(Protocol):
    """Runs a command on the step thread."""

    def __call__(self, command: Callable[[], T]) -> Awaitable[T]: ...


class Borrower:
    """A `kv_transfer.transport.ReservationPort`; `call` brings commands to the step thread."""

    def __init__(self, own_id: WorkerId, borrowed: Borrowed, call: CallOnSteps, clock: Clock) -> None:
        self._own_id = own_id
        self._borrowed = borrowed
        self._call = call
        self._clock = clock
        self.is_draining = False

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        if self.is_draining:
            raise WorkerDraining("this worker takes no new work", worker_id=self._own_id)
        return await self._call(partial(self._borrowed.offer, ticket, time_left_s, self._clock.now()))

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        now = self._clock.now()
        await self._call(
            partial(self._borrowed.write, ticket_id, first_index, num_blocks, payload, check, now)
        )

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        now = self._clock.now()
        await self._call(partial(self._borrowed.commit, ticket_id, num_tokens, num_pushed_blocks, now))

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        await self._call(partial(self._borrowed.abort, ticket_id, self._clock.now()))

    async def keepalive(self, ticket_id: TicketId) -> None:
        await self._call(partial(self._borrowed.keepalive, ticket_id, self._clock.now()))
