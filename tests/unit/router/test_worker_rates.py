"""What the router learns of a worker follows what it sees, within bounds."""

from __future__ import annotations

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost
from router.config import RouterConfig
from router.speeds import Handoff, Speed, assumed_speeds, measured_speeds
from router.worker_rates import WorkerRates
from tests.unit.router.scripted import new_status

_D = WorkerId("d")
_REF = WorkerRef(_D, Role.DECODE, Epoch(1), "")


def test_the_credit_falls_with_hits_that_were_not_there_and_comes_back() -> None:
    rates = WorkerRates()
    for _ in range(60):
        rates.observe_hit(100, 50)
    assert rates.credit == pytest.approx(0.5, abs=0.01)
    for _ in range(60):
        rates.observe_hit(100, 160)
    assert rates.credit == pytest.approx(1.0, abs=0.01)
    rates.observe_hit(0, 0)
    rates.observe_hit(8, 0)
    assert rates.credit == pytest.approx(1.0, abs=0.01)


def test_the_pace_settles_where_predictions_come_true_and_no_hiccup_moves_it_far() -> None:
    rates = WorkerRates()
    rates.observe_reading(10.0, 60_000.0)
    assert rates.pace < 1.06
    for _ in range(200):
        rates.observe_reading(100.0 * rates.pace, 125.0)
    assert rates.pace == pytest.approx(1.25, rel=0.01)
    for _ in range(200):
        rates.observe_reading(100.0, 1.0)
    assert rates.pace >= 0.66


def test_a_pairs_handoff_is_learned_by_its_bytes() -> None:
    rates = WorkerRates()
    for index in range(200):
        num_bytes = (index % 5) * 10_000_000
        rates.observe_handoff(_D, num_bytes, 20.0 + num_bytes * 2e-6, Handoff(5.0, 1e-6))
    found = rates.handoffs[_D]
    assert found.fixed == pytest.approx(20.0, rel=0.1)
    assert found.per_byte == pytest.approx(2e-6, rel=0.1)
    assert WorkerId("other") not in rates.handoffs


def test_a_pair_that_was_dear_once_is_tried_again_after_a_while_and_one_that_is_far_stays_dear() -> None:
    near, far, bad = WorkerId("near"), WorkerId("far"), WorkerId("bad")
    assumed = {near: Handoff(5.0, 1e-6), bad: Handoff(5.0, 1e-6), far: Handoff(5.0, 2e-5)}
    rates = WorkerRates()
    rates.observe_handoff(far, 10_000_000, 205.0, assumed[far])
    rates.observe_handoff(bad, 10_000_000, 300.0, assumed[bad])

    def price(worker: WorkerId) -> float:
        return rates.handoffs[worker].fixed + rates.handoffs[worker].per_byte * 10_000_000

    assert price(bad) > 40.0
    for _ in range(40):
        rates.observe_handoff(near, 10_000_000, 15.0, assumed[near])
    assert price(near) == pytest.approx(15.0)
    assert 15.0 <= price(bad) < 25.0
    assert price(far) == pytest.approx(205.0)


def test_speeds_are_assumed_then_borrowed_then_measured() -> None:
    config = RouterConfig(assumed_prefill_tokens_per_s=500.0, assumed_step_s=0.05, assumed_core_sharing=2.0)
    blank = new_status(_REF)
    nobody = assumed_speeds(config, [blank, None])
    assert nobody.alone == Speed(50.0, 0.0, 0.0, 2.0)
    assert nobody.beside == Speed(100.0, 0.0, 0.0, 4.0)
    reader = new_status(_REF, alone=StepCost(0.0, 0.0, 0.01, 0.001))
    borrowed = measured_speeds(blank, assumed_speeds(config, [reader, blank]), config)
    assert borrowed.alone == Speed(50.0, 0.0, 10.0, 1.0)
    shared = new_status(_REF, beside=StepCost(0.02, 0.002, 0.02, 0.002))
    known = measured_speeds(shared, nobody, config)
    assert known.beside == Speed(20.0, 2.0, 20.0, 2.0)
    assert known.alone == Speed(10.0, 1.0, 10.0, 1.0)


def test_what_is_lost_beside_another_worker_follows_from_the_measured_steps() -> None:
    config = RouterConfig()
    status = new_status(
        _REF, alone=StepCost(0.01, 0.001, 0.01, 0.001), beside=StepCost(0.02, 0.002, 0.02, 0.004)
    )
    speeds = measured_speeds(status, assumed_speeds(config), config)
    assert speeds.lost_share(5) == pytest.approx(0.5)
    assert speeds.lost_share(0) == pytest.approx(0.75)
