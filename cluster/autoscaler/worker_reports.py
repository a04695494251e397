"""WorkerReports: what a worker says of its load to Serve, taken from its own Watch like any router's.

Owns following the worker through its changes of role. `follow` runs on the worker's IO loop, `stats` may be
called from any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from cluster.autoscaler.stats import Stats, worker_stats
from core.jobs import WatchEvent
from core.worker_status import Announcement, WorkerStatus

_AGAIN_S = 0.5


class Watched(Protocol):
    """A worker, as far as it is followed."""

    def watch(self) -> AsyncIterator[WatchEvent]: ...

    def announcement(self) -> Announcement: ...


class WorkerReports:
    """One per worker process."""

    def __init__(self, worker: Watched) -> None:
        self._worker = worker
        self._status: WorkerStatus | None = None

    async def follow(self) -> None:
        """Until cancelled. A Watch that ends, as in a change of role, is taken up again."""
        while True:
            async for event in self._worker.watch():
                if event.status is not None:
                    self._status = event.status
            self._status = None
            await asyncio.sleep(_AGAIN_S)

    def stats(self) -> Stats:
        """By name; empty while nothing is known."""
        return worker_stats(self._status, self._worker.announcement())
