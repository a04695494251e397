"""Arrivals: the moments at which requests are due.

Owns the distributions; how many are wanted, and for what, belongs to `plan`. Pure: the chance is an argument.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from cluster.loadtest.settings import ArrivalKind


def arrival_times(kind: ArrivalKind, rate: float, cv: float, chance: random.Random) -> Iterator[float]:
    """Seconds from the start, without end, `rate` per second in the long run; the first comes after one gap.

    Gaps are exponential for `POISSON`, equal for `CONSTANT`, and for `GAMMA` gamma distributed with shape
    1/cv² and mean 1/rate, so that their standard deviation is `cv` times their mean.
    """
    now = 0.0
    while True:
        now += _gap(kind, rate, cv, chance)
        yield now


def _gap(kind: ArrivalKind, rate: float, cv: float, chance: random.Random) -> float:
    match kind:
        case ArrivalKind.POISSON:
            return chance.expovariate(rate)
        case ArrivalKind.GAMMA:
            shape = 1.0 / cv**2
            return chance.gammavariate(shape, 1.0 / (rate * shape))
        case ArrivalKind.CONSTANT:
            return 1.0 / rate
        case ArrivalKind.CLOSED | ArrivalKind.TRACE:
            raise AssertionError(f"{kind.value} has no distribution")
