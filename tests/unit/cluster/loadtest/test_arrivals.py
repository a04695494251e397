"""Arrivals have the rate and the variance that were asked for, and one seed gives one sequence."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from cluster.loadtest.arrivals import arrival_times
from cluster.loadtest.settings import ArrivalKind

NUM = 20_000


def gaps(kind: ArrivalKind, rate: float, cv: float, seed: int) -> list[float]:
    times = islice(arrival_times(kind, rate, cv, random.Random(seed)), NUM)
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "given", "cv"),
    [
        (ArrivalKind.POISSON, 9.0, 1.0),
        (ArrivalKind.GAMMA, 1.0, 1.0),
        (ArrivalKind.GAMMA, 2.5, 2.5),
        (ArrivalKind.GAMMA, 0.5, 0.5),
    ],
)
def test_rate_and_burstiness_are_as_asked(kind: ArrivalKind, given: float, cv: float, seed: int) -> None:
    found = gaps(kind, 4.0, given, seed)
    # the mean of n gaps is off by cv/sqrt(n) of itself, one standard error
    assert fmean(found) == pytest.approx(0.25, rel=5 * cv / NUM**0.5)
    assert pstdev(found) / fmean(found) == pytest.approx(cv, rel=0.08)


def test_a_poisson_stream_has_as_much_variance_as_mean_in_any_window() -> None:
    times = list(islice(arrival_times(ArrivalKind.POISSON, 5.0, 1.0, random.Random(1)), NUM))
    counts = [0] * int(times[-1])
    for time in times:
        if time < len(counts):
            counts[int(time)] += 1
    assert fmean(counts) == pytest.approx(5.0, rel=0.05)
    assert pstdev(counts) ** 2 == pytest.approx(5.0, rel=0.1)


def test_constant_arrivals_have_equal_gaps() -> None:
    assert gaps(ArrivalKind.CONSTANT, 8.0, 2.0, 0) == pytest.approx([0.125] * NUM)


def test_one_seed_is_one_sequence_and_another_is_another() -> None:
    first, again, other = (gaps(ArrivalKind.GAMMA, 4.0, 2.0, seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other
