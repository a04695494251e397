"""Workers of one host slow each other down, and a router's time is a request's, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.simulator.front import Front, FrontPrice
from cluster.simulator.sharing import Host, Sharing
from engine.step import StepPlan
from tests.unit.cluster.simulator.world import conversations, played

SHARING = Sharing(2, reading=1.9, decoding=1.6)
DECODING = StepPlan(())


def test_a_step_is_slower_exactly_while_another_worker_of_the_host_computes() -> None:
    host = Host(SHARING)
    assert host.seconds("p", 1.0, DECODING, 0.5) == 0.5
    assert host.seconds("d", 1.2, DECODING, 0.1) == pytest.approx(0.16)
    assert host.is_busy(1.4)
    assert not host.is_busy(1.6)
    assert host.seconds("p", 1.5, DECODING, 0.5) == 0.5  # who computed last ended long ago
    assert not host.is_beside("p", 1.5)
    assert host.is_beside("d", 1.9)


def test_a_workers_gap_between_two_steps_is_no_rest() -> None:
    host = Host(SHARING)
    host.seconds("p", 0.0, DECODING, 1.0)
    assert host.is_beside("d", 1.015)
    assert not host.is_beside("d", 1.03)


def test_a_step_that_begins_when_its_neighbour_is_about_to_is_beside_it() -> None:
    host = Host(SHARING)
    host.coming("d", 1.003, until=9.0)
    assert host.seconds("p", 1.0, DECODING, 0.5) == pytest.approx(0.8)
    assert not host.is_beside("p", 1.1)


def test_a_step_is_alone_again_when_its_neighbour_has_done_what_it_had() -> None:
    host = Host(SHARING)
    host.seconds("d", 1.0, DECODING, 0.1)
    # of 0.1 s beside it 0.0625 is progress
    assert host.seconds("p", 1.0, DECODING, 0.5) == pytest.approx(0.5 + 0.1 - 0.0625)
    host = Host(SHARING)
    host.seconds("d", 1.0, DECODING, 0.1)
    host.going_on("d", 1.7)
    assert host.seconds("p", 1.0, DECODING, 0.4) == pytest.approx(0.64)


def test_a_requests_way_is_longer_while_workers_compute_on_the_routers_cores() -> None:
    host = Host(SHARING)
    front = Front(FrontPrice(request_s=0.01, busy_s=0.005), host)
    assert front.ready_at(1.0, 100) == pytest.approx(1.01)
    host.seconds("d", 2.0, DECODING, 0.1)
    assert front.ready_at(2.05, 100) == pytest.approx(2.065)
    # which is no work of the router's: who comes next does not wait for it
    assert front.ready_at(2.05, 100) == pytest.approx(2.075)
    assert front.ready_at(3.0, 100) == pytest.approx(3.01)


@pytest.mark.parametrize(
    ("values", "named"),
    [((0, 1.0, 1.0), "num_cores"), ((2, 0.9, 1.0), "reading"), ((2, 1.0, float("nan")), "decoding")],
)
def test_a_sharing_that_cannot_be_is_named(values: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sharing(*values)


def test_requests_wait_for_the_router_one_after_the_other() -> None:
    front = Front(FrontPrice(request_s=0.01, token_s=1e-4))
    assert front.ready_at(1.0, 100) == pytest.approx(1.02)
    assert front.ready_at(1.0, 0) == pytest.approx(1.03)
    assert front.ready_at(5.0, 0) == pytest.approx(5.01)
    with pytest.raises(ValueError, match="token_s"):
        FrontPrice(token_s=-1.0)


def test_a_simulation_on_one_host_is_slower_and_one_behind_a_slow_router_later() -> None:
    arrivals = conversations(30)
    apart, together = played(arrivals), played(arrivals, sharing=SHARING)
    assert sum(record.ended_s for record in together.records) > sum(
        record.ended_s for record in apart.records
    )
    late = played(arrivals, front=FrontPrice(request_s=0.2))
    for one, other in zip(arrivals, late.records, strict=True):
        assert other.token_times[0] >= one.arrival_s + 0.2


def test_a_load_tests_answers_end_by_their_own_length() -> None:
    arrivals = conversations(20)
    single = [replace(item, record=replace(item.record, num_output_tokens=1)) for item in arrivals]
    outcome = played(single, is_length_known=True)
    # whoever says that one token is all needs no decode worker
    assert "prefill_only" in {record.plan for record in outcome.records}
    assert "prefill_only" not in {record.plan for record in played(single).records}
    assert all(len(record.token_times) == 1 for record in outcome.records)
