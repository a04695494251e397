"""Fleet: the router's table of workers, fed by hand instead of by Watch streams.

Owns when the index's views are mended: `router.view_repairs` in virtual time. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

from cluster.simulator.events import Events
from core.errors import WorkerLost
from core.ids import WorkerId, WorkerRef
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import Announcement
from router.config import RouterConfig
from router.worker_entry import WorkerEntry, WorkerState
from router.worker_table import WorkerTable
from router.workers import Worker

_LONGEST_PAUSE_S = 8.0


class Paged(Protocol):
    """Who answers what an index asks for."""

    def page(self, job: SnapshotJob) -> BlockPage: ...


@dataclass(slots=True)
class _Repair:
    """Of one worker's view: whether a page is on its way, and when the next pass may begin."""

    source: Paged
    pause_s: float
    is_open: bool = False
    until: float = field(default=0.0)


class Fleet(WorkerTable):
    """A `WorkerTable` without tasks: `enter` and `hear` say what there is."""

    def __init__(self, config: RouterConfig, events: Events, message_s: float) -> None:
        super().__init__(config, _Nobody(), _unreachable, events)
        self._events = events
        self._message_s = message_s
        self._shortest_s = config.reconnect_s
        self._repairs: dict[WorkerId, _Repair] = {}
        self.num_pages = 0

    def enter(self, announcement: Announcement, source: Paged) -> None:
        """A worker lives."""
        ref = announcement.ref
        entry = WorkerEntry(announcement, _unreachable(ref), self._events.now(), WorkerState.ALIVE)
        self._entries[ref.worker_id] = entry
        self._repairs[ref.worker_id] = _Repair(source, self._shortest_s)
        self.index.join(ref.worker_id, ref.epoch, 2 * announcement.num_blocks)

    def leave(self, ref: WorkerRef) -> None:
        """A worker is gone, and nothing is placed on it."""
        del self._entries[ref.worker_id]
        del self._repairs[ref.worker_id]
        self.index.forget(ref.worker_id)
        while self.index.clear_some():
            pass

    def hear(self, ref: WorkerRef, event: WatchEvent) -> None:
        """One message of a worker; of one that has left it changes nothing."""
        entry = self.entry(ref)
        if entry is None:
            return
        entry.heard_at = self._events.now()
        if event.status is not None:
            entry.take_status(event.status)
        self.index.apply(ref.worker_id, event)
        if self.index.confidence(ref.worker_id) < 1.0:
            self._mend(ref.worker_id)

    def _mend(self, worker_id: WorkerId) -> None:
        """See `ViewRepairs.wake`."""
        repair, now = self._repairs[worker_id], self._events.now()
        if repair.is_open or now < repair.until:
            return
        is_soon = now < repair.until + repair.pause_s
        repair.pause_s = min(_LONGEST_PAUSE_S, 2 * repair.pause_s) if is_soon else self._shortest_s
        if self._ask(worker_id, repair):
            repair.is_open = True
            repair.until = now + repair.pause_s

    def _ask(self, worker_id: WorkerId, repair: _Repair) -> bool:
        job = self.index.ask(worker_id)
        if job is not None:
            self._events.after(self._message_s, self._answer, worker_id, repair, job)
        return job is not None

    def _answer(self, worker_id: WorkerId, repair: _Repair, job: SnapshotJob) -> None:
        page = repair.source.page(job)
        self._events.after(self._message_s, self._fill, worker_id, repair, job, page)

    def _fill(self, worker_id: WorkerId, repair: _Repair, job: SnapshotJob, page: BlockPage) -> None:
        if self._repairs.get(worker_id) is not repair:
            return
        self.num_pages += 1
        for _ in self.index.fill(worker_id, job, page):
            pass
        repair.is_open = self._ask(worker_id, repair)


class _Nobody:
    """Membership is not polled."""

    async def announcements(self) -> tuple[Announcement, ...]:
        return ()


class _NoCalls:
    """Stands where an entry's connection would be."""

    def __init__(self, ref: WorkerRef) -> None:
        self._ref = ref

    def __getattr__(self, name: str) -> object:
        raise WorkerLost("a simulated worker is not called through its entry", worker_id=self._ref.worker_id)


def _unreachable(ref: WorkerRef) -> Worker:
    return cast(Worker, _NoCalls(ref))
