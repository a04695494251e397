"""Waiting in line for one of several equal workers: Poisson arrivals, nearly constant service.

Source: Erlang's C formula; for constant service the waiting time is about half of the one with exponential
service (Cosmetatos 1975), so its tail falls twice as fast. Pure.
"""

from __future__ import annotations

import math


def waiting_quantile_s(num_workers: int, rate: float, service_s: float, quantile: float) -> float:
    """The wait that `quantile` of arrivals do not exceed; infinite when the workers cannot keep up."""
    spare = num_workers / service_s - rate
    if spare <= 0:
        return math.inf
    chance = _chance_to_wait(num_workers, rate * service_s)
    if chance <= 1 - quantile:
        return 0.0
    return math.log(chance / (1 - quantile)) / (2 * spare)


def _chance_to_wait(num_workers: int, load: float) -> float:
    """Erlang C by the recursion of Erlang B, which cannot overflow."""
    blocked = 1.0
    for busy in range(1, num_workers + 1):
        blocked = load * blocked / (busy + load * blocked)
    usage = load / num_workers
    return blocked / (1 - usage * (1 - blocked))
