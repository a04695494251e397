"""Stand-ins for what tests must control: time.

Everything else in the tests is the real part.
"""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
