"""A line that is learned on the way finds the truth, follows a change, and never promises a negative cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.running_line import RunningLine


def test_before_the_first_observation_nothing_is_known() -> None:
    line = RunningLine(typical_x=8)
    assert line.coefficients == (0.0, 0.0)
    assert line.num_observed == 0


def test_the_line_behind_noisy_observations_is_found() -> None:
    chance = random.Random(1)
    line = RunningLine(typical_x=32)
    for _ in range(300):
        x = chance.choice([16, 64, 512])
        line.observe(x, (10 + 0.5 * x) * chance.uniform(0.95, 1.05))
    intercept, slope = line.coefficients
    assert slope == pytest.approx(0.5, rel=0.05)
    assert intercept == pytest.approx(10, rel=0.25)
    assert line.at(100) == pytest.approx(60, rel=0.05)


def test_one_x_alone_is_split_where_the_parts_are_thought_to_be_equal() -> None:
    line = RunningLine(typical_x=32)
    for _ in range(50):
        line.observe(32, 10.0)
    intercept, slope = line.coefficients
    assert intercept == pytest.approx(5.0)
    assert slope * 32 == pytest.approx(5.0)


def test_a_change_is_followed_and_the_seed_forgotten() -> None:
    line = RunningLine(typical_x=32, decay=0.9, seed=(100, 1e6))
    for factor in (1.0, 3.0):
        for index in range(100):
            x = 10 + index % 7 * 20
            line.observe(x, factor * (5 + x))
    intercept, slope = line.coefficients
    assert slope == pytest.approx(3.0, rel=0.02)
    assert intercept == pytest.approx(15.0, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6)), min_size=1, max_size=40),
    st.floats(0.1, 1e6),
)
def test_no_coefficient_is_negative_and_the_mean_is_kept(
    points: list[tuple[float, float]], typical_x: float
) -> None:
    line = RunningLine(typical_x)
    for x, y in points:
        line.observe(x, y)
    intercept, slope = line.coefficients
    assert intercept >= 0.0
    assert slope >= 0.0
    assert line.at(max(x for x, _ in points)) < 1e13
