"""Clients that hang up at any moment leave nothing behind, and nobody else notices."""

from __future__ import annotations

from tests.e2e.aborts import SETTINGS, Aborts
from tests.e2e.fleet import Models
from tests.e2e.glass import GlassSystem, Moment


def test_aborts_at_any_moment_leave_all_gauges_at_zero_and_no_block_held(models: Models) -> None:
    model = models.toy()
    with GlassSystem(model, SETTINGS) as system:
        outcome = Aborts(models, model, system, num_aborts=300, seed=1).run()
    assert all(outcome.moments[moment] >= 10 for moment in Moment), outcome
