"""Time as an argument: Clock, Deadline.

Deadlines travel between processes as time left (seconds), because monotonic clocks of two machines do not
agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; tests use one that they move by hand."""

    def now(self) -> float: ...


class MonotonicClock:
    """The process's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on this process's clock after which nobody waits any more."""

    at: float

    @staticmethod
    def after(seconds: float, clock: Clock) -> Deadline:
        return Deadline(clock.now() + seconds)

    def left_s(self, clock: Clock) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - clock.now())

    def is_past(self, clock: Clock) -> bool:
        return clock.now() >= self.at
