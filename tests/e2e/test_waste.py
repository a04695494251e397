"""Waste: of the KV slots that sequences hold, nearly all are in use."""

from __future__ import annotations

from tests.e2e import profiles
from tests.e2e.fleet import Fleet
from tests.e2e.waste import MAX_WASTE, measure_waste


def test_less_than_four_percent_of_held_slots_are_empty(fleet: Fleet) -> None:
    waste = measure_waste(fleet, fleet.system(profiles.SPLIT, "toy"), num_tokens=200)
    assert waste.mean_context >= 400
    assert 0 <= waste.share < MAX_WASTE, str(waste)
