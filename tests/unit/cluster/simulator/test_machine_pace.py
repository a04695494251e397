"""How fast a machine is that is not equally fast all the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.simulator.front import FrontPrice
from cluster.simulator.machine_pace import Pace
from cluster.simulator.profile import Profile, read_profile, write_profile
from cluster.simulator.step_price import BatchPrice
from tests.unit.cluster.simulator.world import SMALL

THEN = Pace(0.2)
BATCHES = (BatchPrice(1.0, 0.006, 1e-6), BatchPrice(4.0, 0.01, 2e-6))
PROFILE = Profile(
    SMALL.layout,
    1000,
    16_384,
    replace(SMALL.price, batches=BATCHES),
    SMALL.link,
    front=FrontPrice(0.01, 1e-6, 0.002),
    pace=THEN,
)


def test_a_slower_machine_takes_longer() -> None:
    assert Pace(0.3).slower_than(THEN) == pytest.approx(1.5)
    assert THEN.slower_than(THEN) == 1.0


def test_a_profile_keeps_its_pace(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE


def test_a_profile_without_one_says_so(tmp_path: Path) -> None:
    write_profile(replace(PROFILE, pace=None), tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").pace is None


@pytest.mark.parametrize("read_s", [0.0, -1.0, float("nan")])
def test_nothing_takes_no_time(read_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Pace(read_s)
