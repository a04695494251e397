"""Legs: the calls of a request that are under way at workers, and telling workers to stop.

Owns what is cancelled when a request ends before its calls, and that each cancel is bounded in time. Knows
neither retries nor tokens. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from core.errors import ServingError
from core.ids import RequestId, TicketId
from core.jobs import CancelJob
from router.worker_entry import WorkerEntry

_CANCEL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Leg:
    """A call under way, to be cancelled if the request ends before it."""

    entry: WorkerEntry
    ticket_id: TicketId | None


class Legs:
    """The open legs of one request."""

    def __init__(self) -> None:
        self.open: list[Leg] = []

    def of(self, entry: WorkerEntry, ticket_id: TicketId | None) -> Leg | None:
        return next((leg for leg in self.open if leg.entry is entry and leg.ticket_id == ticket_id), None)

    def close(self, leg: Leg | None) -> None:
        """The call has ended by itself. Safe to call twice."""
        if leg is not None and leg in self.open:
            self.open.remove(leg)


class Cancels:
    """Cancels on their way; one per router."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def later(self, leg: Leg, request_id: RequestId, reason: str, sample_index: int | None = None) -> None:
        """`now` without waiting for it."""
        task = asyncio.create_task(self.now(leg, request_id, reason, _CANCEL_TIMEOUT_S, sample_index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def now(
        self, leg: Leg, request_id: RequestId, reason: str, timeout_s: float, sample_index: int | None = None
    ) -> None:
        """Tell a worker to stop, or to stop one sample; one that cannot be told is gone or will notice by
        itself (deadline, detached stream).
        """
        job = CancelJob(request_id, leg.ticket_id, reason, sample_index)
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await leg.entry.worker.cancel(job)

    async def settle(self) -> None:
        """Wait for those on their way; each is bounded in time."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
