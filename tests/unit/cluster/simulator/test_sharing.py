"""Workers of one host slow each other down, and a router's time is a request's, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from greenlet import greenlet

from cluster.simulator.events import Events
from cluster.simulator.front import Front, FrontPrice
from cluster.simulator.sharing import Host, Sharing
from tests.unit.cluster.simulator.world import conversations, played

SHARING = Sharing(2, reading=2.0, decoding=1.6)


class Cores:
    """A host, and when the steps that it was given have ended and what they were told then."""

    def __init__(self) -> None:
        self.events = Events()
        self.host = Host(SHARING, self.events)
        self.ended: dict[str, float] = {}
        self.beside: dict[str, bool | None] = {}

    def step(self, worker: str, begin_s: float, alone_s: float, is_reading: bool = False) -> None:
        def run() -> None:
            self.beside[worker] = self.host.run(worker, alone_s, is_reading)
            self.ended[worker] = self.events.now()

        self.events.at(begin_s, lambda: greenlet(run).switch())


def test_steps_at_different_times_take_what_they_take_alone() -> None:
    cores = Cores()
    cores.step("p", 1.0, 0.5, is_reading=True)
    cores.step("d", 1.6, 0.1)
    cores.events.run()
    assert cores.ended == {"p": pytest.approx(1.5), "d": pytest.approx(1.7)}
    assert cores.beside == {"p": False, "d": False}


def test_a_step_is_slower_exactly_while_another_worker_of_the_host_computes() -> None:
    cores = Cores()
    cores.step("p", 1.0, 0.5, is_reading=True)
    cores.step("d", 1.2, 0.1)  # in 0.16 s, of which p makes 0.08 s
    cores.events.run()
    assert cores.ended == {"d": pytest.approx(1.36), "p": pytest.approx(1.58)}
    assert cores.beside == {"d": True, "p": None}


def test_a_step_that_runs_is_slowed_by_one_that_begins_and_not_by_the_next_one_when_it_has_ended() -> None:
    cores = Cores()
    cores.step("d", 1.0, 0.1)
    cores.step("p", 1.05, 0.1, is_reading=True)  # d has 0.05 s left: 0.08 s, of which p makes 0.04
    cores.step("later", 1.3, 0.1)
    cores.events.run()
    assert cores.ended["d"] == pytest.approx(1.13)
    assert cores.ended["p"] == pytest.approx(1.19)
    assert cores.ended["later"] == pytest.approx(1.4)


def test_a_workers_gap_between_two_steps_is_no_rest() -> None:
    cores = Cores()
    cores.step("p", 0.0, 1.0)
    cores.events.run()
    assert cores.host.is_busy(1.015)
    assert not cores.host.is_busy(1.03)
    assert not cores.host.is_busy(1.015, besides="p")


def test_a_requests_way_is_longer_while_workers_compute_on_the_routers_cores() -> None:
    cores = Cores()
    front = Front(FrontPrice(request_s=0.01, busy_s=0.005), cores.host)
    assert front.ready_at(1.0, 100) == pytest.approx(1.01)
    cores.step("d", 2.0, 0.1)
    cores.events.run(until=2.05)
    assert front.ready_at(2.05, 100) == pytest.approx(2.065)
    # which is no work of the router's: who comes next does not wait for it
    assert front.ready_at(2.05, 100) == pytest.approx(2.075)
    cores.events.run()
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
