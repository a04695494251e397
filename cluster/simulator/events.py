"""Events: what happens next, in virtual time.

Owns the order of everything: by time, and at one time by who came first. Knows nothing of what happens. One
thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Also the clock of whoever sees things happen at once: router and clients."""

    def __init__(self) -> None:
        self._now = 0.0
        self.num_made = 0
        self._waiting: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def now(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def at(self, when: float, act: Callable[..., object], *arguments: Any) -> None:
        """Have `act(*arguments)` called at `when`, which is not in the past."""
        assert when >= self._now, f"{when} lies before {self._now}"
        self.num_made += 1
        heapq.heappush(self._waiting, (when, self.num_made, act, arguments))

    def after(self, seconds: float, act: Callable[..., object], *arguments: Any) -> None:
        """The same, from now on."""
        self.at(self._now + seconds, act, *arguments)

    def run(self, until: float = float("inf")) -> None:
        """Let things happen, up to and including `until`, or until nothing is left."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= until:
            self._now, _, act, arguments = heapq.heappop(waiting)
            act(*arguments)

    def __len__(self) -> int:
        return len(self._waiting)


class SiteClock:
    """A worker's own time: during its step it is ahead of the others', who hear of it afterwards."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at
