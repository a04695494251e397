"""QuietMetrics: an engine's metrics that nobody scrapes: the running averages, and none of the series.

A simulation takes a million steps; setting gauges would be a third of their time. One thread.
"""

from __future__ import annotations

from core.worker_status import WorkerStatus
from engine.metrics import EngineMetrics
from engine.sequence import Sequence


class QuietMetrics(EngineMetrics):
    """What a WorkerStatus carries is measured as on any worker."""

    def observe_status(self, status: WorkerStatus) -> None:
        """Not exported."""

    def observe_leak(self, difference: int) -> None:
        """Not exported; a simulation asserts it."""

    def observe_start(self, sequence: Sequence) -> None:
        """Not exported."""

    def observe_generated(self, num_tokens: int) -> None:
        """Not exported."""

    def observe_finish(self, reason: str) -> None:
        """Not exported."""

    def observe_slots(self, num_held: int, num_computed: int, now: float) -> None:
        """Not exported."""

    def observe_duration(self, seconds: float) -> None:
        """Not exported."""
