"""Whatever a seed brings, streams are the oracle's or end by a typed error in time, and all is freed.

The whole path runs: pipeline, table, index, placement, both workers and the bridge; see `tests.simulation`.
Twenty thousand seeds are part of `make accept`. A seed that fails is replayed by
`python -m tests.simulation SEED`.
"""

from __future__ import annotations

import pytest

from tests.simulation.chain_model import Oracle
from tests.simulation.scenario import scenario_of
from tests.simulation.world import Report, play

NUM_SEEDS = 1000
SEEDS_PER_TEST = 50


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_streams_are_right_or_end_by_an_error_in_time_and_nothing_stays_held(
    first: int, oracle: Oracle
) -> None:
    reports = {seed: play(scenario_of(seed), oracle) for seed in range(first, first + SEEDS_PER_TEST)}
    broken = {seed: report.broken for seed, report in reports.items() if report.broken}
    assert not broken
    _exercised(list(reports.values()))


def _exercised(reports: list[Report]) -> None:
    """The troubles came, the bridge was used, and most requests got their answers all the same."""
    num_complete = sum(report.num_complete for report in reports)
    assert num_complete > 5 * sum(report.num_errors for report in reports)
    assert sum(report.plans["remote"] for report in reports) > len(reports)
    assert sum(report.num_troubles for report in reports) > len(reports)


def test_the_same_seed_is_the_same_play(oracle: Oracle) -> None:
    first, second = play(scenario_of(3), oracle), play(scenario_of(3), oracle)
    assert first == second
