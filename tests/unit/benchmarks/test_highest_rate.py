"""The search for goodput finds it, whatever the curve does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.highest_rate import Search, Steps


@dataclass(frozen=True)
class _Run:
    speed: float
    attainment: float

    @property
    def is_slo_met(self) -> bool:
        return self.attainment >= 0.9

    @property
    def goodput_rps(self) -> float:
        return self.speed * self.attainment


def _search(attainment: Callable[[float], float], steps: Steps | None = None) -> Search[_Run]:
    search = Search(lambda speed: _Run(speed, attainment(speed)), steps or Steps())
    search.go()
    return search


@pytest.mark.parametrize("limit", [0.6, 1.3, 2.0, 2.11, 3.9])
def test_the_highest_rate_within_the_slo_is_found_to_an_eighth_of_a_step(limit: float) -> None:
    search = _search(lambda speed: 1.0 if speed <= limit else 0.1)
    assert search.highest is not None
    assert limit - 0.25 / 8 < search.highest <= limit


def test_a_dip_below_the_slo_does_not_hide_a_higher_rate_within_it() -> None:
    search = _search(lambda speed: {2.25: 0.88, 2.5: 0.91}.get(speed, 1.0 if speed < 2.25 else 0.3))
    assert search.highest is not None
    assert search.highest >= 2.5


def test_the_peak_beyond_the_slo_is_seen() -> None:
    search = _search(lambda speed: 1.0 if speed <= 2.0 else 0.85 if speed <= 3.0 else 0.2)
    assert search.highest == 2.0
    assert search.peak == 3.0


def test_who_never_meets_the_slo_has_no_goodput_and_the_search_ends() -> None:
    search = _search(lambda speed: 0.5)
    assert search.highest is None
    assert min(search.found) == 0.25
    assert max(search.found) == 6.0


def test_no_rate_is_run_twice_nor_beyond_the_most() -> None:
    asked: list[float] = []

    def attainment(speed: float) -> float:
        asked.append(speed)
        return 0.95

    search = _search(attainment, Steps(start=1.0, step=0.5, most=2.2))
    assert len(asked) == len(set(asked))
    assert max(asked) <= 2.2
    assert search.highest == 2.1875


@pytest.mark.parametrize(
    "values", [(0.1, 0.25, 6.0, 3), (7.0, 0.25, 6.0, 3), (2.0, 0.0, 6.0, 3), (2.0, 0.25, 6.0, -1)]
)
def test_steps_that_lead_nowhere_are_refused(values: tuple[float, float, float, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Steps(*values)
