"""The rules in a closed loop with a plant: numbers follow the load, and do not swing (cases 38 and 39)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cluster.autoscaler.config import AutoscalingConfig
from core.ids import Role
from tests.unit.cluster.autoscaler.plant import Plant, Traffic

CONFIG = AutoscalingConfig(
    is_enabled=True,
    can_flip=False,
    max_prefill_workers=6,
    max_decode_workers=6,
    startup_s=10.0,
    scale_down_delay_s=30.0,
    idle_delay_s=20.0,
)
# one prefill worker reads 2.5 of these a second; 70 % of what it should
STEADY = Traffic(3.4, num_prompt=400, num_output=40)


def num_changes(plant: Plant) -> int:
    return sum(len(changes) for changes in plant.changes.values())


@pytest.mark.parametrize("seed", range(3))
def test_constant_load_moves_nothing_once_it_is_met(seed: int) -> None:
    plant = Plant(CONFIG, seed=seed)
    plant.traffic = STEADY
    plant.run(60)
    met = num_changes(plant)
    plant.run(240)
    assert num_changes(plant) - met <= 1
    assert plant.num_queued < 20


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_load_is_one_climb_and_one_descent(seed: int) -> None:
    plant = Plant(CONFIG, seed=seed)
    plant.traffic = STEADY
    plant.run(120)
    before = plant.targets()
    plant.traffic = replace(STEADY, per_s=3 * STEADY.per_s)
    plant.run(60)
    assert plant.targets()[0] > before[0]
    plant.traffic = STEADY
    plant.run(200)
    assert plant.targets()[0] <= before[0] + 1
    for role in Role:
        # each of the three levels of load turns the direction once at most
        assert plant.num_reversals(role) <= 2, plant.changes[role]


def test_what_decode_lacks_grows_only_decode() -> None:
    plant = Plant(CONFIG)
    plant.traffic = Traffic(6.0, num_prompt=10, num_output=300)
    plant.run(90)
    assert plant.targets()[0] == 1
    assert plant.targets()[1] > 1


def test_what_prefill_lacks_grows_only_prefill() -> None:
    plant = Plant(CONFIG)
    plant.traffic = Traffic(1.5, num_prompt=2000, num_output=1)
    plant.run(90)
    assert plant.targets()[0] > 2
    assert plant.targets()[1] == 1


def test_kv_that_fills_grows_decode_before_anything_is_preempted() -> None:
    plant = Plant(replace(CONFIG, target_itl_s=5.0), num_prefill=4)
    plant.num_places, plant.stream_s = 1000, 0.0
    plant.base_s = 0.1
    plant.traffic = Traffic(1.2, num_prompt=100, num_output=400)
    plant.run(150, until=lambda: plant.targets()[1] > 1)
    assert plant.targets()[1] > 1
    assert plant.num_queued <= 2
    assert plant.num_preempted == 0
    plant.run(120)
    assert plant.num_preempted == 0


def test_the_need_is_seen_a_start_ahead() -> None:
    def grown_after(startup_s: float) -> float:
        plant = Plant(replace(CONFIG, target_itl_s=5.0, startup_s=startup_s), num_prefill=4)
        plant.base_s, plant.num_places = 0.1, 1000
        plant.traffic = Traffic(1.2, num_prompt=100, num_output=400)
        start = plant.now
        plant.run(300, until=lambda: plant.targets()[1] > 1)
        return plant.now - start

    assert grown_after(10.0) < 60.0


def test_nothing_asked_for_long_is_zero_and_the_next_request_wakes_it() -> None:
    plant = Plant(replace(CONFIG, min_prefill_workers=0, min_decode_workers=0))
    plant.traffic = Traffic(1.0)
    plant.run(30)
    for _ in range(3):
        plant.traffic = Traffic(0.0)
        plant.run(60)
        assert plant.targets() == (0, 0)
        num_served = plant.num_served
        plant.run(60)
        assert plant.targets() == (0, 0)
        plant.traffic = Traffic(1.0)
        plant.run(30)
        assert plant.num_served > num_served
        assert min(plant.targets()) >= 1


def test_a_burst_that_prefill_cannot_read_takes_workers_from_an_idle_decode_pool() -> None:
    config = replace(CONFIG, can_flip=True, max_workers=6, max_decode_workers=4, idle_delay_s=500.0)
    plant = Plant(config, num_prefill=2, num_decode=4)
    plant.run(20)
    plant.traffic = Traffic(3.0, num_prompt=1200, num_output=2)
    plant.run(10)
    assert plant.num_working(Role.PREFILL) > 2
    assert plant.targets()[0] + plant.targets()[1] <= 6
    plant.traffic = Traffic(2.0, num_prompt=20, num_output=150)
    plant.run(150)
    assert plant.num_queued < 5


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("start", [(4, 4), (1, 7)])
def test_where_both_phases_lack_workers_they_do_not_take_them_from_each_other_for_ever(
    start: tuple[int, int], seed: int
) -> None:
    config = replace(
        CONFIG, can_flip=True, max_prefill_workers=8, max_decode_workers=8, max_workers=8, idle_delay_s=500.0
    )
    plant = Plant(config, *start, seed=seed)
    plant.traffic = Traffic(8.0, num_prompt=600, num_output=200)
    plant.run(300)
    turns = [decision.flips[0].role for _, _, decision in plant.decisions if decision.flips]
    # one load: what waits must not look like one phase's need, and then like the other one's
    assert sum(one is not two for one, two in pairwise(turns)) <= 1, turns
    assert plant.num_served > 0.7 * 300 * plant.traffic.per_s
    assert all(sum(pool.num_replicas for pool in (d.prefill, d.decode)) <= 8 for _, _, d in plant.decisions)


# bursts of a few long prompts, after the pool had shrunk to what the mean of them needs
@example([2.1319649185452616, 0.22836106576032128, 0.373466262121482], (1500, 4), 2.0, False, 20)
@example([1.9933587808882163, 5.1129093145836215, 1.25, 1.327086692844192], (1500, 4), 2.0, True, 690)
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    levels=st.lists(st.floats(0.0, 9.0), min_size=2, max_size=4),
    shape=st.sampled_from([(400, 40), (100, 150), (1500, 4)]),
    startup_s=st.sampled_from([2.0, 15.0]),
    can_flip=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_load_makes_the_pools_swing(
    levels: list[float], shape: tuple[int, int], startup_s: float, can_flip: bool, seed: int
) -> None:
    config = replace(CONFIG, startup_s=startup_s, can_flip=can_flip)
    plant = Plant(config, seed=seed)
    for per_s in levels:
        num_before = {role: plant.num_reversals(role) for role in Role}
        plant.traffic = Traffic(per_s, *shape)
        plant.run(120)
        for role in Role:
            # the one from the load before, and one of its own
            assert plant.num_reversals(role) - num_before[role] <= 2, plant.changes[role]
            assert 1 <= plant.targets()[role is Role.DECODE] <= 6
    settled = {role: plant.num_reversals(role) for role in Role}
    plant.run(200)
    assert all(plant.num_reversals(role) - settled[role] <= 1 for role in Role), plant.changes
