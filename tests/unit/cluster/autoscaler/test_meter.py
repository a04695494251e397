"""From reports to load: rates over a window, silence, growth."""

from __future__ import annotations

import pytest

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.load import Load
from cluster.autoscaler.meter import Fleet, Meter, Report
from core.ids import Role

CONFIG = AutoscalingConfig(window_s=10.0, stale_s=5.0)
NOBODY = {role: Fleet(0, 0) for role in Role}
WORKER = {
    **dict.fromkeys(("num_waiting", "num_waiting_tokens", "num_running_tokens", "num_held_tokens"), 0.0),
    **dict.fromkeys(("is_draining", "is_stand_in", "is_pinned"), 0.0),
    "role": 1.0,
    "num_running": 3.0,
    "num_kv_tokens": 640.0,
    "max_num_seqs": 8.0,
    "step_s": 0.03,
}


class Reports:
    """Routers that report once a second; their clocks are not ours."""

    def __init__(self) -> None:
        self.meter = Meter(CONFIG)
        self.now = 50.0
        self.sums: dict[str, dict[str, float]] = {"r0": {"arrived": 0.0}}

    def second(self, num_routers: int = 1, **amounts: float) -> Load:
        self.now += 1.0
        for sums in self.sums.values():
            for name, amount in amounts.items():
                sums[name] = sums.get(name, 0.0) + amount
        reports = [Report(name, self.now + 1e9, dict(sums)) for name, sums in self.sums.items()]
        return self.meter.load(NOBODY, Fleet(num_routers, num_routers, reports), self.now)

    def seconds(self, num: int, **amounts: float) -> Load:
        for _ in range(num - 1):
            self.second(**amounts)
        return self.second(**amounts)


def test_rates_are_those_of_the_window() -> None:
    reports = Reports()
    reports.seconds(30, arrived=2, arrived_tokens=100, gaps=10, gaps_s=0.5)
    router = reports.seconds(30, arrived=1, arrived_tokens=400, gaps=10, gaps_s=1.0).router
    assert router is not None
    assert (router.arrivals_per_s, router.tokens_per_s) == (1.0, 400.0)
    assert (router.num_prompt_tokens, router.itl_s, router.growth_per_s) == (400.0, 0.1, 0.0)


def test_all_routers_count_and_one_that_is_missing_makes_it_unknown() -> None:
    reports = Reports()
    reports.sums["r1"] = {"arrived": 0.0}
    router = reports.seconds(30, num_routers=2, arrived=2).router
    assert router is not None
    assert router.arrivals_per_s == 4.0
    del reports.sums["r1"]
    assert reports.second(num_routers=2, arrived=2).router is None


def test_a_router_whose_time_stands_still_is_unknown_and_comes_back() -> None:
    reports = Reports()
    assert reports.seconds(5, arrived=1).router is not None
    frozen = [Report("r0", 1e9 + reports.now, dict(reports.sums["r0"]))]
    still = reports.meter.load(NOBODY, Fleet(1, 1, frozen), reports.now + 4.0)
    assert still.router is not None
    assert reports.meter.load(NOBODY, Fleet(1, 1, frozen), reports.now + 6.0).router is None
    reports.now += 7.0
    assert reports.second(arrived=1).router is not None


def test_growth_that_goes_on_is_told_from_a_step_and_from_chance() -> None:
    ramp = Reports()
    for per_s in range(4, 34):
        grown = ramp.second(arrived=per_s).router
    assert grown is not None
    assert grown.growth_per_s == pytest.approx(1 / 31, rel=0.2)
    step = Reports()
    step.seconds(30, arrived=5)
    for _ in range(30):
        jumped = step.second(arrived=20).router
        assert jumped is not None
        assert jumped.growth_per_s == 0.0
    noise = Reports()
    for per_s in (3, 3, 3, 3, 3, 3, 3, 3, 4, 3, 4, 3, 4, 4, 4, 4, 4, 5, 4, 4, 4):
        chance = noise.second(arrived=per_s).router
        assert chance is not None
        assert chance.growth_per_s == 0.0


def test_before_an_answer_has_ended_its_length_is_what_was_asked_for() -> None:
    reports = Reports()
    router = reports.seconds(3, arrived=1, expected_tokens=200).router
    assert router is not None
    assert router.num_output_tokens == 200.0
    router = reports.seconds(3, arrived=1, expected_tokens=200, ended=1, output_tokens=20).router
    assert router is not None
    assert router.num_output_tokens == 20.0


def test_workers_are_named_after_their_pool_and_incomplete_ones_left_out() -> None:
    fleet = Fleet(3, 4, [Report("a", 1.0, WORKER), Report("b", 1.0, {"role": 1.0})])
    load = Meter(CONFIG).load({**NOBODY, Role.PREFILL: fleet}, Fleet(1, 1), 0.0)
    (worker,) = load.workers
    assert (worker.worker_id, worker.home, worker.role) == ("prefill-a", Role.PREFILL, Role.DECODE)
    assert (worker.num_running, worker.step_s, worker.prefill_tokens_per_s) == (3, 0.03, None)
    assert (load.prefill.num_target, load.prefill.num_running, load.is_complete) == (4, 3, False)
