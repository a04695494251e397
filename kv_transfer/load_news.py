"""LoadNews: when a worker's load is to be told: each `period_s`, and soon after sequences came or went.

A router takes for others' what a worker has beyond that router's own sequences. A load in which sequences are
counted that have ended since would show it queues that are not there. Lives on the step thread.
"""

from __future__ import annotations

MIN_PERIOD_S = 0.05
"""Between two loads that are told because sequences came or went: routers hear at most so many."""


class LoadNews:
    """One per worker."""

    def __init__(self, period_s: float, min_period_s: float = MIN_PERIOD_S) -> None:
        self._period_s = period_s
        self._min_period_s = min(min_period_s, period_s)
        self._told_at = float("-inf")
        self._told: tuple[int, int] = (0, 0)
        self._is_guess = False

    def arrived(self) -> None:
        """A job was told as if it waited and nothing of it were cached; what it is has become known now."""
        self._is_guess = True

    def has_news(self, num_waiting: int, num_running: int) -> bool:
        """Whether sequences came or went, if there are so many now."""
        return self._is_guess or self._told != (num_waiting, num_running)

    def is_due(self, now: float, num_waiting: int, num_running: int) -> bool:
        """Whether the load, which holds so many sequences at `now`, is to be told."""
        is_news = self.has_news(num_waiting, num_running)
        return now >= self._told_at + (self._min_period_s if is_news else self._period_s)

    def told(self, now: float, num_waiting: int, num_running: int) -> None:
        """It was told with so many."""
        self._told_at = now
        self._told = (num_waiting, num_running)
        self._is_guess = False
