"""ViewRepairs: fetches what the index lacks of a worker, page by page, in the background.

Owns the tasks that fetch: one per worker at most, and few at a time, so that a router that has just started
serves while it learns. Decides nothing: the index says what to ask for. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging

from core.clock import Clock
from core.errors import ServingError, WorkerError
from core.ids import WorkerId
from router.prefix_index import PrefixIndex
from router.workers import Worker

_MAX_AT_ONCE = 4
_MAX_PAGES = 65_536
_LONGEST_PAUSE_S = 8.0

_log = logging.getLogger(__name__)


class ViewRepairs:
    """`pause_s`: between two repairs of one worker at least, twice as long after each that did not last."""

    def __init__(self, index: PrefixIndex, clock: Clock, pause_s: float) -> None:
        self.num_failed = 0
        """Repairs that ended because the worker did not answer."""
        self._index = index
        self._clock = clock
        self._shortest_s = pause_s
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._pauses: dict[WorkerId, tuple[float, float]] = {}  # until when, how long

    def wake(self, worker_id: WorkerId, worker: Worker) -> None:
        """Repair the worker's view, if it needs that and nothing does it already. Cheap, and called after
        each message of the worker: what cannot be done now is tried again with its next sign of life.
        """
        if worker_id in self._tasks or self._index.confidence(worker_id) == 1.0:
            return
        until, pause_s = self._pauses.get(worker_id, (0.0, self._shortest_s))
        now = self._clock.now()
        if now < until or self._index.ask(worker_id) is None:
            return
        is_soon = now < until + pause_s
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s) if is_soon else self._shortest_s
        self._pauses[worker_id] = (now + pause_s, pause_s)
        self._tasks[worker_id] = asyncio.create_task(
            self._repair(worker_id, worker), name=f"repair {worker_id}"
        )

    def end(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()
        self._pauses.pop(worker_id, None)

    async def stop(self) -> None:
        """End all."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repair(self, worker_id: WorkerId, worker: Worker) -> None:
        try:
            async with self._room:
                await self._fetch(worker_id, worker)
        except ServingError as error:
            _log.info("the blocks of %s cannot be fetched: %s", worker_id, error.message)
            self.num_failed += 1
            self._index.abandon(worker_id)
        except Exception:  # noqa: BLE001 - logged; the view stays in doubt
            _log.exception("fetching the blocks of %s failed", worker_id)
            self.num_failed += 1
            self._index.abandon(worker_id)
        finally:
            if self._tasks.get(worker_id) is asyncio.current_task():
                del self._tasks[worker_id]

    async def _fetch(self, worker_id: WorkerId, worker: Worker) -> None:
        for _ in range(_MAX_PAGES):
            job = self._index.ask(worker_id)
            if job is None:
                return
            page = await worker.snapshot(job)
            for _ in self._index.fill(worker_id, job, page):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        raise WorkerError("its pages never end", worker_id=worker_id)
