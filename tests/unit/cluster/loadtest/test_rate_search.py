"""The search finds the highest rate of a made-up server, in few steps."""

from __future__ import annotations

import random

import pytest

from cluster.loadtest.rate_search import Bracket, RateSearch
from cluster.loadtest.settings import Search
from tests.unit.cluster.loadtest.reports import make_report


def find(capacity: float, start: float, search: Search | None = None) -> tuple[Bracket, int, str]:
    found = RateSearch(search or Search(), start)
    num_steps = 0
    while (rate := found.next_rate) is not None:
        num_steps += 1
        found.add(rate, rate <= capacity)
    return found.bracket, num_steps, found.reason


@pytest.mark.parametrize("capacity", [0.2, 0.9, 1.0, 3.7, 117.0, 5000.0])
@pytest.mark.parametrize("start", [1.0, 40.0])
@pytest.mark.parametrize("precision", [0.2, 0.02])
def test_the_highest_rate_is_found_within_the_precision(
    capacity: float, start: float, precision: float
) -> None:
    search = Search(precision=precision, lowest=0.01, max_steps=40)
    bracket, num_steps, reason = find(capacity, start, search)
    assert bracket.passing is not None
    assert bracket.failing is not None
    assert bracket.passing <= capacity < bracket.failing <= bracket.passing * (1 + precision) * 1.0001
    assert num_steps <= 22
    assert "within" in reason


def test_a_queue_s_goodput_is_found_where_its_theory_has_it() -> None:
    """A made-up server that reads five prompts a second: the SLO is kept for some way below that."""
    search = RateSearch(Search(precision=0.1), 1.0)
    while (rate := search.next_rate) is not None:
        search.add(rate, make_report(rate).steps[0].has_passed)
    assert search.bracket.passing is not None
    assert 3.0 < search.bracket.passing < 4.9


def test_bounds_and_steps_end_the_search() -> None:
    bracket, num_steps, reason = find(1e9, 10.0, Search(highest=50.0))
    assert (bracket.passing, bracket.failing, num_steps) == (50.0, None, 4)
    assert "the highest rate of the search, 50/s, passes" in reason
    bracket, _, reason = find(0.001, 8.0)
    assert (bracket.passing, bracket.failing) == (None, 1.0)
    assert "the lowest rate of the search, 1/s, fails" in reason
    _, num_steps, reason = find(117.0, 1.0, Search(max_steps=5))
    assert (num_steps, reason) == (5, "stopped after 5 steps")


def test_time_ends_the_search_with_what_is_known() -> None:
    search = RateSearch(Search(max_seconds=100.0), 2.0)
    search.add(2.0, True, 60.0)
    assert search.next_rate == 4.0
    search.add(4.0, False, 120.0)
    assert search.next_rate is None
    assert search.reason == "stopped after 120 s"
    assert search.bracket == Bracket(2.0, 4.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_lucky_pass_above_a_failure_does_not_count(seed: int) -> None:
    chance = random.Random(seed)
    search = RateSearch(Search(max_steps=30), 1.0)
    while (rate := search.next_rate) is not None:
        search.add(rate, chance.random() < 1 / (1 + (rate / 5) ** 8))
    bracket = search.bracket
    if bracket.passing is not None and bracket.failing is not None:
        assert bracket.passing < bracket.failing
