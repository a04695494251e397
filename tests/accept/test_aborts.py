"""Acceptance, aborts: ten thousand clients hang up wherever their request is; nothing is left behind."""

from __future__ import annotations

import pytest

from tests.e2e.aborts import SETTINGS, Aborts
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Models
from tests.e2e.glass import GlassSystem, Moment

NUM_ABORTS = 10_000


@pytest.mark.timeout(1800)
def test_ten_thousand_aborts_leave_nothing_behind(models: Models, report: Report) -> None:
    model = models.toy()
    with GlassSystem(model, SETTINGS) as system:
        outcome = Aborts(models, model, system, NUM_ABORTS, seed=3).run()
    assert all(outcome.moments[moment] >= NUM_ABORTS / 20 for moment in Moment), outcome
    report("g", f"{NUM_ABORTS} aborts, 2 prefill and 2 decode workers", outcome)
