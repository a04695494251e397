"""Single rules of the autoscaler: patience, bounds, budget, roles, what is unknown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.autoscaler.budget import divide
from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import Decision, Flip, Rule, State
from cluster.autoscaler.load import Load, PoolCount
from core.config import from_mapping
from core.errors import InvalidConfig
from core.ids import Role
from tests.unit.cluster.autoscaler.loads import QUIET, load_of, pair, worker

CONFIG = AutoscalingConfig(
    is_enabled=True,
    can_flip=False,
    scale_up_delay_s=3.0,
    scale_down_delay_s=10.0,
    idle_delay_s=30.0,
    startup_s=5.0,
)
FLIPPING = replace(CONFIG, can_flip=True)
# 2.5 workers' worth of prompts
COMING = replace(QUIET, num_open=1, arrivals_per_s=5.0, tokens_per_s=2000.0, num_arrived=10_000)


class Asked:
    """The rules, asked once a second."""

    def __init__(self, config: AutoscalingConfig = CONFIG) -> None:
        self.config, self.state, self.now = config, State(), 0.0

    def second(self, load: Load) -> Decision:
        decision, self.state = decide(load, self.config, self.state, self.now)
        self.now += 1.0
        return decision

    def seconds(self, num: int, load: Load) -> Decision:
        for _ in range(num - 1):
            self.second(load)
        return self.second(load)


def test_a_need_counts_when_it_has_lasted() -> None:
    asked = Asked()
    asked.seconds(5, pair())
    assert [asked.second(pair(COMING)).prefill.num_replicas for _ in range(5)] == [1, 1, 1, 4, 4]
    assert asked.second(pair(COMING)).prefill.rule is Rule.GROW


def test_a_peak_within_the_patience_keeps_the_workers() -> None:
    asked, fleet = Asked(), [worker(f"p{i}", Role.PREFILL) for i in range(3)]
    low, high = (load_of(*fleet, worker("d", Role.DECODE), router=router) for router in (QUIET, COMING))
    busy = replace(low, router=replace(QUIET, num_open=1))
    for _ in range(5):
        assert asked.seconds(9, busy).prefill.num_replicas == 3
        assert asked.second(high).prefill.num_replicas == 3
    assert asked.seconds(11, busy).prefill.num_replicas == 1


def test_those_that_are_left_must_carry_the_load_with_a_margin() -> None:
    fleet = [worker(f"p{i}", Role.PREFILL) for i in range(3)]
    # 1.8 workers' worth: two would do, but not with a fifth to spare
    router = replace(COMING, tokens_per_s=1440.0)
    assert Asked().seconds(30, load_of(*fleet, router=router)).prefill.num_replicas == 3
    router = replace(COMING, tokens_per_s=1240.0)
    assert Asked().seconds(30, load_of(*fleet, router=router)).prefill.num_replicas == 2


def test_so_few_workers_as_did_not_suffice_are_tried_again_when_that_is_long_ago() -> None:
    asked = Asked()
    two = load_of(worker("p1", Role.PREFILL), worker("p2", Role.PREFILL))
    # 0.7 workers' worth, then a second wave
    low, high = (replace(two, router=replace(COMING, tokens_per_s=rate)) for rate in (560.0, 1240.0))
    assert asked.seconds(15, low).prefill.num_replicas == 1
    one = replace(load_of(worker("p1", Role.PREFILL)), router=high.router)
    assert asked.seconds(5, one).prefill.num_replicas == 2
    kept = [asked.second(low).prefill.num_replicas for _ in range(300)]
    # 20 times the 10 s that it waits before it shrinks
    assert (kept[190], kept[-1], sum(kept)) == (2, 1, 300 + kept.index(1)), kept


def test_what_is_unknown_changes_nothing_for_however_long() -> None:
    asked = Asked()
    busy = pair(COMING)
    assert asked.seconds(100, replace(busy, router=None)).prefill.rule is Rule.UNKNOWN
    silent = replace(busy, workers=(), prefill=PoolCount(3, 3), decode=PoolCount(3, 3), router=QUIET)
    asked = Asked(replace(CONFIG, idle_delay_s=1000.0))
    last = asked.seconds(100, silent)
    assert (last.prefill.num_replicas, last.decode.num_replicas) == (3, 3)


def test_replicas_that_are_starting_are_not_asked_for_again() -> None:
    asked = Asked()
    asked.seconds(5, pair(COMING))
    starting = replace(pair(COMING), prefill=PoolCount(4, 1))
    assert asked.seconds(20, starting).prefill.num_replicas == 4


def test_replicas_that_are_starting_get_the_time_to_show_what_they_do() -> None:
    asked = Asked()
    asked.seconds(5, pair(COMING))
    quiet = replace(pair(replace(QUIET, num_open=1)), prefill=PoolCount(4, 1))
    assert asked.seconds(50, quiet).prefill.num_replicas == 4, "a start takes 5 s, but they are not there"
    assert asked.seconds(15, quiet).prefill.num_replicas == 1, "and do not come"


def test_the_bounds_of_a_pool_hold_and_are_named() -> None:
    asked = Asked(replace(CONFIG, max_prefill_workers=2))
    full = load_of(worker("p", Role.PREFILL), worker("q", Role.PREFILL), router=COMING)
    last = asked.seconds(10, full)
    assert (last.prefill.num_replicas, last.prefill.rule) == (2, Rule.BOUND)


def test_both_pools_keep_one_budget() -> None:
    asked = Asked(replace(CONFIG, max_gpus=8.0, max_prefill_workers=9, max_decode_workers=9))
    hungry = replace(
        pair(replace(COMING, num_open=300), num_running=300, max_num_seqs=50), gpus_per_worker=2.0
    )
    last = asked.seconds(10, hungry)
    assert last.prefill.num_replicas + last.decode.num_replicas == 4
    assert last.decode.rule is Rule.BUDGET


def test_a_division_of_the_budget_that_is_nearly_as_good_stays() -> None:
    wanted, least = {Role.PREFILL: 6, Role.DECODE: 6}, {Role.PREFILL: 1, Role.DECODE: 1}
    present = {Role.PREFILL: 3, Role.DECODE: 3}

    def divided(prefill: float, decode: float) -> dict[Role, int]:
        return divide(wanted, {Role.PREFILL: prefill, Role.DECODE: decode}, least, present, 6)

    assert divided(6.0, 5.0) == divided(5.0, 6.0) == present
    assert divided(6.0, 1.5) == {Role.PREFILL: 4, Role.DECODE: 2}


def test_a_worker_to_spare_changes_its_role_before_a_replica_is_started() -> None:
    asked = Asked(FLIPPING)
    fleet = [worker(f"d{i}", Role.DECODE, num_running=2 - i) for i in range(3)]
    quiet = load_of(worker("p", Role.PREFILL), *fleet, router=replace(QUIET, num_open=3))
    asked.seconds(9, quiet)
    load = replace(quiet, router=replace(COMING, tokens_per_s=1200.0))
    decisions = [asked.second(load) for _ in range(8)]
    flips = [decision.flips for decision in decisions if decision.flips]
    assert flips == [(Flip("d2", Role.PREFILL),)], "the least busy one"
    assert all(decision.prefill.num_replicas == 1 for decision in decisions)


def test_an_order_under_way_is_not_given_twice_and_lapses() -> None:
    asked = Asked(FLIPPING)
    fleet = [worker(f"d{i}", Role.DECODE) for i in range(3)]
    load = load_of(worker("p", Role.PREFILL), *fleet, router=replace(COMING, tokens_per_s=1200.0))
    given = [index for index in range(60) if asked.second(load).flips]
    assert len(given) >= 2
    assert all(second - first >= 20 for first, second in pairwise(given))


def test_whoever_is_not_needed_away_goes_home_before_a_pool_shrinks() -> None:
    asked = Asked(FLIPPING)
    away = load_of(
        worker("p", Role.PREFILL),
        worker("d0", Role.DECODE),
        worker("d1", Role.PREFILL, home=Role.DECODE),
        router=replace(QUIET, num_open=1),
    )
    decisions = [asked.second(away) for _ in range(12)]
    assert [decision.flips for decision in decisions if decision.flips] == [(Flip("d1", Role.DECODE),)]
    assert all(decision.decode.num_replicas == 2 for decision in decisions)
    home = load_of(
        worker("p", Role.PREFILL),
        worker("d0", Role.DECODE),
        worker("d1", Role.DECODE),
        router=replace(QUIET, num_open=1),
    )
    assert asked.seconds(12, home).decode.num_replicas == 1


def test_a_stand_in_counts_as_at_home_and_the_empty_pool_grows() -> None:
    asked = Asked(replace(FLIPPING, min_decode_workers=0))
    stands_in = load_of(
        worker("p", Role.DECODE, home=Role.PREFILL, is_stand_in=True), router=replace(COMING, num_open=3)
    )
    first = asked.second(stands_in)
    assert (first.prefill.num_replicas, first.decode.num_replicas) == (1, 1)
    assert first.decode.rule is Rule.WAKE
    assert first.flips == ()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_prefill_workers": -1}, "min_prefill_workers"),
        ({"min_decode_workers": 5}, "max_decode_workers"),
        ({"max_decode_workers": 0}, "max_decode_workers"),
        ({"max_workers": 1}, "max_workers"),
        ({"max_gpus": 0.0}, "max_gpus"),
        ({"target_ttft_s": 0.0}, "target_ttft_s"),
        ({"target_kv_utilization": 1.5}, "target_kv_utilization"),
        ({"scale_down_margin": -0.1}, "scale_down_margin"),
        ({"flip_back_delay_s": -1.0}, "flip_back_delay_s"),
        ({"stale_s": 1.0}, "stale_s"),
        ({"max_log_bytes": 10}, "max_log_bytes"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        from_mapping(AutoscalingConfig, settings, "autoscaling")
