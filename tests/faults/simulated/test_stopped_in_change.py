"""A worker that is stopped while it changes its role, or for longer than a stall may last, is as good as
before: nobody has to start another one in its place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.awake import Awake
from tests.simulation.chain_model import Oracle
from tests.simulation.network import Weather
from tests.simulation.scenario import Scenario, Trouble, TroubleKind, scenario_of
from tests.simulation.world import play

CHANGES_AT_S = 2.0
SEED_OF_A_STOP_IN_A_CHANGE = 11234


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def disturbed(seed: int, *troubles: Trouble) -> Scenario:
    """The requests of a seed on one worker of each role, in good weather."""
    return replace(
        scenario_of(seed), num_prefill=1, num_decode=1, weather=Weather(), troubles=tuple(troubles)
    )


@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("lasts_s", [2.0, 6.0, 120.0])
def test_a_worker_that_is_stopped_anywhere_in_a_change_of_role_completes_it(
    victim: int, lasts_s: float, oracle: Oracle
) -> None:
    for number, after_s in enumerate((0.0, 0.001, 0.005, 0.02, 0.1, 0.25, 0.31)):
        change = Trouble(TroubleKind.ROLE, 8.0, at_s=CHANGES_AT_S, victim=victim)
        stop = Trouble(TroubleKind.STOP, lasts_s, at_s=CHANGES_AT_S + after_s, victim=victim)
        report = play(disturbed(number, change, stop), oracle)
        assert not report.broken, after_s
        assert report.num_troubles == 2


def test_a_stop_for_longer_than_a_stall_may_last_is_no_stall(oracle: Oracle) -> None:
    for at_s in (0.6, 1.0, 1.5, 2.0, 2.5, 3.0):
        for victim in (0, 1):
            stop = Trouble(TroubleKind.STOP, 90.0, at_s=at_s, victim=victim)
            assert not play(disturbed(7, stop), oracle).broken


def test_bounds_that_count_stopped_time_are_seen(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not play(scenario_of(SEED_OF_A_STOP_IN_A_CHANGE), oracle).broken
    monkeypatch.setattr(Awake, "lost_s", lambda awake, since: 0.0)
    assert play(scenario_of(SEED_OF_A_STOP_IN_A_CHANGE), oracle).broken
