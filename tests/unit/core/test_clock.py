"""Deadlines never give negative time."""

from __future__ import annotations

from core.clock import Deadline, MonotonicClock


class At:
    def __init__(self, moment: float) -> None:
        self.moment = moment

    def now(self) -> float:
        return self.moment


def test_time_left_ends_at_zero() -> None:
    deadline = Deadline.after(5.0, At(10.0))
    assert deadline.left_s(At(12.0)) == 3.0
    assert deadline.left_s(At(20.0)) == 0.0
    assert not deadline.is_past(At(14.9))
    assert deadline.is_past(At(15.0))


def test_the_monotonic_clock_moves_forward() -> None:
    clock = MonotonicClock()
    assert clock.now() <= clock.now()
