"""SpeedBook: the speeds of all workers of the table, looked up and not computed for each placement.

Owns when they are computed anew: a worker's with its status, what is assumed of others once in a while; and
that workers of one role that share the cores of a host are equally fast. What one of them has measured in a
bad moment would otherwise keep from it the work by which it could measure again. Lives on the event loop.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from core.clock import Clock
from core.worker_status import WorkerStatus
from router.config import RouterConfig
from router.distance import Distances
from router.speeds import Speeds, assumed_speeds, mean_speeds, measured_speeds
from router.worker_entry import WorkerEntry
from router.worker_table import WorkerTable

_ASSUME_PERIOD_S = 1.0


class SpeedBook:
    """One per router."""

    def __init__(self, config: RouterConfig, table: WorkerTable, clock: Clock) -> None:
        self.distances = Distances(config)
        self._config = config
        self._table = table
        self._clock = clock
        self._assumed = assumed_speeds(config)
        self._assumed_at = float("-inf")
        self._known: WeakKeyDictionary[WorkerEntry, tuple[WorkerStatus, Speeds]] = WeakKeyDictionary()
        self._pooled: WeakKeyDictionary[WorkerEntry, tuple[WorkerStatus, Speeds]] = WeakKeyDictionary()

    def of(self, entry: WorkerEntry) -> Speeds:
        """What is known of the worker now."""
        status = entry.status
        if status is None or status.num_shared_cores == 0:
            return self._measured(entry)
        known = self._pooled.get(entry)
        if known is None or known[0] is not status:
            twins = [other for other in self._table.entries() if _are_twins(entry, other)]
            known = self._pooled[entry] = (status, mean_speeds([self._measured(twin) for twin in twins]))
        return known[1]

    def _measured(self, entry: WorkerEntry) -> Speeds:
        status = entry.status
        if status is None:
            return self._assume()
        known = self._known.get(entry)
        if known is None or known[0] is not status:
            known = self._known[entry] = (status, measured_speeds(status, self._assume(), self._config))
        return known[1]

    def _assume(self) -> Speeds:
        now = self._clock.now()
        if now >= self._assumed_at + _ASSUME_PERIOD_S:
            self._assumed_at = now
            statuses = [entry.status for entry in self._table.entries()]
            self._assumed = assumed_speeds(self._config, statuses)
        return self._assumed


def _are_twins(one: WorkerEntry, other: WorkerEntry) -> bool:
    """Whether both do the same work with the same model on the same cores."""
    if one is other:
        return True
    mine, its = one.announcement, other.announcement
    return (
        other.status is not None
        and other.status.num_shared_cores > 0
        and its.node == mine.node
        and its.layout == mine.layout
        and other.ref.role is one.ref.role
    )
