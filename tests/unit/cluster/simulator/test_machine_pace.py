"""Prices of one and the same machine, which is not equally fast all the time."""

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


def test_all_is_slower_on_a_slower_machine() -> None:
    later = PROFILE.at_pace(Pace(0.3))
    streams, prompt = (1.0, 0.0, 0.0, 4.0, 1000.0), (1.0, 300.0, 45_000.0, 2.0, 100.0)
    assert later.price.seconds(streams) == pytest.approx(1.5 * PROFILE.price.seconds(streams))
    assert later.price.seconds(prompt) == pytest.approx(1.5 * PROFILE.price.seconds(prompt))
    assert later.front.request_s == pytest.approx(0.015)
    assert later.front.busy_s == pytest.approx(0.003)
    # and back again
    again = later.at_pace(THEN)
    assert again.price.seconds(prompt) == pytest.approx(PROFILE.price.seconds(prompt))
    assert again.price.seconds(streams) == pytest.approx(PROFILE.price.seconds(streams))


def test_between_two_looks_it_is_their_mean() -> None:
    assert THEN.mean_with(Pace(0.4)).read_s == pytest.approx(0.3)


def test_a_profile_keeps_its_pace(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == PROFILE


def test_prices_of_an_unknown_pace_are_left_alone() -> None:
    with pytest.raises(ValueError, match="how fast the machine was"):
        replace(PROFILE, pace=None).at_pace(THEN)


@pytest.mark.parametrize("read_s", [0.0, -1.0, float("nan")])
def test_nothing_takes_no_time(read_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Pace(read_s)
