"""Acceptance, waste: 32 streams of the bundled model with mean context of at least 400 tokens."""

from __future__ import annotations

import pytest

from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.waste import MAX_WASTE, measure_waste

ROOMY = Profile("roomy", {"router.plan": "remote", "engine.kv_cache_bytes": 1 << 30})


@pytest.mark.timeout(900)
def test_waste_of_the_bundled_model(fleet: Fleet, report: Report) -> None:
    waste = measure_waste(fleet, fleet.system(ROOMY), num_tokens=128)
    assert waste.mean_context >= 400
    assert 0 <= waste.share < MAX_WASTE, str(waste)
    report("e", "32 streams, handed over", waste)
