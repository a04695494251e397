"""Beside a worker that reads, decode steps keep a bounded stretch of their own pace."""

from __future__ import annotations

import pytest

from engine.pace import Pace
from engine.step_costs import StepWork

READING, EIGHT, SIXTEEN = StepWork(64, 8), StepWork(0, 8), StepWork(0, 16)


def learned(stretch: float = 2.0) -> Pace:
    """After steps of 8 and of 16 streams that took 16 and 24 ms alone."""
    pace = Pace(stretch)
    for number in range(50):
        pace.observe(EIGHT, number, number + 0.016, False)
        pace.observe(SIXTEEN, number, number + 0.024, False)
    return pace


@pytest.mark.parametrize(("work", "alone_s"), [(EIGHT, 0.016), (SIXTEEN, 0.024)])
def test_the_next_step_begins_a_stretch_after_the_last_one_began(work: StepWork, alone_s: float) -> None:
    pace = learned()
    pace.observe(work, 100.0, 100.02, True)
    assert pace.pause_s(100.02) == pytest.approx(2.0 * alone_s - 0.02, abs=0.001)
    assert pace.pause_s(100.02 + 0.005) == pytest.approx(2.0 * alone_s - 0.025, abs=0.001)


def test_a_step_that_took_longer_than_the_stretch_is_followed_at_once() -> None:
    pace = learned()
    pace.observe(EIGHT, 100.0, 100.05, True)
    assert pace.pause_s(100.05) == 0.0


def test_a_worker_that_reads_prompts_itself_does_not_wait() -> None:
    pace = learned()
    pace.observe(READING, 100.0, 100.01, True)
    assert pace.pause_s(100.01) == 0.0


def test_steps_beside_another_worker_do_not_slow_the_pace_further() -> None:
    pace = learned()
    for number in range(100, 200):
        pace.observe(EIGHT, number, number + 0.030, True)
        pace.observe(EIGHT, number, number + 0.030, None)
    assert pace.pause_s(199.03) == pytest.approx(0.002, abs=0.001)


def test_nobody_waits_before_a_step_ran_alone_or_without_a_stretch() -> None:
    fresh = Pace(2.0)
    fresh.observe(EIGHT, 1.0, 1.01, True)
    assert fresh.pause_s(1.01) == 0.0
    eager = learned(stretch=1.0)
    eager.observe(EIGHT, 1.0, 1.001, True)
    assert eager.pause_s(1.001) == 0.0
