"""Acceptance, waste: 32 streams of the bundled model with mean context of at least 400 tokens."""

from __future__ import annotations

import pytest

from tests.e2e import profiles
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.waste import MAX_WASTE, measure_waste


@pytest.mark.timeout(900)
def test_waste_of_the_bundled_model(fleet: Fleet, report: Report) -> None:
    waste = measure_waste(fleet, fleet.system(profiles.SPLIT), num_tokens=128)
    assert waste.mean_context >= 400
    assert 0 <= waste.share < MAX_WASTE, str(waste)
    report("e", "32 streams, handed over", waste)
