"""A plane that is learned on the way tells two causes apart, and never promises a negative cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.running_plane import RunningPlane


def test_before_the_first_observation_nothing_is_known() -> None:
    assert RunningPlane(8, 100).coefficients == (0.0, 0.0, 0.0)


def test_the_plane_behind_noisy_observations_is_found() -> None:
    chance = random.Random(1)
    plane = RunningPlane(typical_x=32, typical_z=100_000)
    for _ in range(400):
        x, z = chance.choice([16, 64, 512]), chance.uniform(0, 1e6)
        plane.observe(x, z, (10 + 0.5 * x + 2e-4 * z) * chance.uniform(0.98, 1.02))
    intercept, slope_x, slope_z = plane.coefficients
    assert slope_x == pytest.approx(0.5, rel=0.05)
    assert slope_z == pytest.approx(2e-4, rel=0.05)
    assert intercept == pytest.approx(10, rel=0.5)


def test_one_point_alone_is_split_where_the_parts_are_thought_to_be_equal() -> None:
    plane = RunningPlane(typical_x=32, typical_z=1000)
    for _ in range(50):
        plane.observe(32, 1000, 30.0)
    intercept, slope_x, slope_z = plane.coefficients
    assert intercept == pytest.approx(10.0)
    assert slope_x * 32 == pytest.approx(10.0)
    assert slope_z * 1000 == pytest.approx(10.0)


def test_causes_that_always_come_together_keep_their_sum() -> None:
    plane = RunningPlane(typical_x=8, typical_z=8000)
    for index in range(100):
        x = 1 + index % 9
        plane.observe(x, 1000 * x, 5.0 + 2.0 * x)
    intercept, slope_x, slope_z = plane.coefficients
    assert slope_x + 1000 * slope_z == pytest.approx(2.0, rel=0.05)
    assert intercept == pytest.approx(5.0, rel=0.1)


_TRIPLES = st.tuples(st.floats(0, 1e6), st.floats(0, 1e12), st.floats(0, 1e6))


@given(st.lists(_TRIPLES, min_size=1, max_size=40))
def test_no_coefficient_is_negative_or_endless(points: list[tuple[float, float, float]]) -> None:
    plane = RunningPlane(32, 1e5)
    for x, z, y in points:
        plane.observe(x, z, y)
    assert all(0.0 <= value < 1e13 for value in plane.coefficients)
