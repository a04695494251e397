"""Who waits is served by priority, and among equals by tenants' weights; nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import FairQueue

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), min_size=2, max_size=4)


def new_queue(aging_s: float = 1e9) -> FairQueue[str]:
    return FairQueue(9, aging_s)


@settings(deadline=None, max_examples=40)
@given(WEIGHTS, st.randoms(use_true_random=False))
def test_service_of_tenants_that_always_wait_is_proportional_to_their_weights(
    weights: dict[str, int], chance: random.Random
) -> None:
    queue = new_queue()
    costs = {tenant: chance.choice([1, 10, 100]) for tenant in weights}
    for tenant, weight in weights.items():
        for _ in range(3):
            queue.push(tenant, tenant, weight, costs[tenant], 5, 0.0)
    served: Counter[str] = Counter()
    for _ in range(3000):
        entry = queue.pop(0.0)
        assert entry is not None
        served[entry.item] += costs[entry.item]
        queue.push(entry.item, entry.item, weights[entry.item], costs[entry.item], 5, 0.0)
    rates = [served[tenant] / weight for tenant, weight in weights.items()]
    slack = 2 * max(costs[tenant] / weight for tenant, weight in weights.items())
    assert max(rates) - min(rates) <= slack + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=80))
def test_somebody_is_served_as_long_as_anybody_waits(steps: list[tuple[str, int, bool]]) -> None:
    queue = new_queue(aging_s=3.0)
    num_waiting = 0
    for now, (tenant, priority, is_push) in enumerate(steps):
        if is_push:
            queue.push(tenant, tenant, 1.0, 10, priority, float(now))
            num_waiting += 1
        else:
            assert (queue.pop(float(now)) is not None) == (num_waiting > 0)
            num_waiting = max(0, num_waiting - 1)
        assert len(queue) == num_waiting


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=40), st.integers(0, 9))
def test_one_tenants_equals_keep_their_order(tenants: list[str], priority: int) -> None:
    queue = new_queue()
    for number, tenant in enumerate(tenants):
        queue.push(f"{number}", tenant, 1.0, 10, priority, float(number))
    order: dict[str, list[int]] = {}
    while (entry := queue.pop(100.0)) is not None:
        order.setdefault(entry.tenant, []).append(int(entry.item))
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_a_higher_priority_goes_first_however_light_its_tenant() -> None:
    queue = new_queue()
    queue.push("low", "heavy", 100.0, 1, 1, 0.0)
    queue.push("high", "light", 0.1, 1000, 8, 1.0)
    assert [entry.item for _ in range(2) if (entry := queue.pop(2.0))] == ["high", "low"]


@given(st.integers(0, 9), st.integers(0, 9))
def test_no_class_starves_under_an_endless_stream_of_the_highest(low: int, aging_s: int) -> None:
    aging = 1.0 + aging_s
    queue = new_queue(aging)
    entry = queue.push("waits", "a", 1.0, 100, low, 0.0)
    now, waited_s = 0.0, 0.0
    while entry.is_waiting:
        now += 0.5
        queue.push("other", "b", 1.0, 100, 9, now)
        queue.push("other", "b", 1.0, 100, 9, now)
        served = queue.pop(now)
        assert served is not None
        waited_s = now
        assert waited_s <= aging * (9 - low) + 2.0
    assert waited_s >= 0.5


def test_a_tenant_that_comes_late_is_not_paid_for_the_time_it_was_away() -> None:
    queue = new_queue()
    for _ in range(50):
        queue.push("a", "a", 1.0, 10, 5, 0.0)
    for _ in range(40):
        assert queue.pop(0.0) is not None
    for _ in range(10):
        queue.push("b", "b", 1.0, 10, 5, 1.0)
    first = Counter(entry.item for _ in range(10) if (entry := queue.pop(1.0)))
    assert first["a"] == pytest.approx(5, abs=1)


def test_the_last_of_the_lowest_class_gives_its_place_up() -> None:
    queue = new_queue()
    queue.push("first low", "a", 1.0, 10, 2, 0.0)
    queue.push("last low", "a", 1.0, 10, 2, 1.0)
    queue.push("normal", "a", 1.0, 10, 5, 2.0)
    assert queue.last_below(2) is None
    last = queue.last_below(9)
    assert last is not None
    assert last.item == "last low"
    queue.remove(last)
    queue.remove(last)
    assert len(queue) == 2


def test_whoever_leaves_leaves_nothing_behind() -> None:
    queue = new_queue()
    entries = [queue.push("x", f"t{index}", 1.0, 1, index % 10, 0.0) for index in range(1000)]
    for entry in entries:
        queue.remove(entry)
    assert len(queue) == 0
    assert queue.pop(0.0) is None
    assert not queue._lines
