"""Workers of a running cluster are killed one after the other under streams: no token is lost or repeated."""

from __future__ import annotations

import pytest

from tests.e2e import profiles
from tests.e2e.fleet import Fleet
from tests.e2e.storm import Plan, Storm


@pytest.mark.timeout(240)
def test_streams_of_a_toy_survive_two_kills_of_whichever_worker(fleet: Fleet) -> None:
    system = fleet.system(profiles.FOUR, "toy", is_local=False)
    outcome = Storm(fleet, system, "toy", Plan(12, 6, 400, num_kills=2), seed=5).run()
    assert not outcome.lost, str(outcome.lost)
    assert not outcome.ledger.near_ties, "toys have wide gaps"
    assert outcome.num_kills == 2
    assert outcome.num_streams >= 12
