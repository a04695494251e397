"""The simple policies do what their names say; all policies keep the rules of plans and layouts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from router.config import PlanSetting, PolicySetting, RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.placement import place
from tests.unit.router.scripted import LAYOUT, new_status

_LONG = Demand(100)
SIMPLE = [setting for setting in PolicySetting if setting is not PolicySetting.COST]


def _worker(role: Role, name: str, **fields: Any) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    return Candidate(ref, LAYOUT, new_status(ref), **fields)


def _ps(*names: str) -> list[Candidate]:
    return [_worker(Role.PREFILL, name) for name in names]


def _ds(*names: str) -> list[Candidate]:
    return [_worker(Role.DECODE, name) for name in names]


def _place(
    policy: PolicySetting,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    turn: int = 0,
    demand: Demand = _LONG,
    plan: PlanSetting = PlanSetting.AUTO,
) -> Decision:
    config = RouterConfig(policy=policy, plan=plan)
    decision = place(demand, prefills, decodes, config, Draw(random.Random(turn), turn))
    assert decision is not None
    return decision


def _name(candidate: Candidate | None) -> str:
    assert candidate is not None
    return candidate.ref.worker_id


def test_round_robin_takes_one_after_the_other_in_any_order_of_the_table() -> None:
    found = []
    for turn in range(6):
        decodes = _ds("a", "b", "c")
        random.Random(turn).shuffle(decodes)
        found.append(_name(_place(PolicySetting.ROUND_ROBIN, [], decodes, turn).decode))
    assert found == ["a", "b", "c", "a", "b", "c"]


def test_least_loaded_takes_the_fewest_tokens_then_the_fewest_sequences() -> None:
    decodes = [
        _worker(Role.DECODE, "tokens", num_ahead_tokens=9),
        _worker(Role.DECODE, "seqs", num_seqs=3),
        _worker(Role.DECODE, "least", num_seqs=1),
    ]
    assert {_name(_place(PolicySetting.LEAST_LOADED, [], decodes, turn).decode) for turn in range(9)} == {
        "least"
    }


def test_the_better_of_two_never_takes_the_worst_of_three_and_takes_the_middle_at_times() -> None:
    decodes = [_worker(Role.DECODE, str(load), num_ahead_tokens=load) for load in (1, 2, 3)]
    found = Counter(_name(_place(PolicySetting.POWER_OF_TWO, [], decodes, turn).decode) for turn in range(90))
    assert set(found) == {"1", "2"}
    assert found["1"] > found["2"]
    assert _name(_place(PolicySetting.POWER_OF_TWO, [], decodes[:1]).decode) == "1"


def test_prefix_affinity_takes_the_longest_prefix_whatever_the_load() -> None:
    decodes = [
        _worker(Role.DECODE, "short", num_cached_tokens=32),
        _worker(Role.DECODE, "long", num_cached_tokens=64, num_ahead_tokens=9999),
    ]
    assert _name(_place(PolicySetting.PREFIX_AFFINITY, [], decodes).decode) == "long"


@pytest.mark.parametrize("policy", list(PolicySetting))
def test_every_policy_keeps_the_rules(policy: PolicySetting) -> None:
    prefills, decodes = _ps("p"), _ds("d")
    remote, local = PlanSetting.REMOTE, PlanSetting.LOCAL
    assert _place(policy, prefills, decodes, plan=remote).plan is Plan.REMOTE
    assert _place(policy, prefills, decodes, plan=local).plan is Plan.LOCAL
    assert _place(policy, [], decodes, plan=remote).plan is Plan.LOCAL
    single = Demand(100, is_ended_by_prefill=True)
    assert _place(policy, prefills, [], demand=single).plan is Plan.PREFILL_ONLY
    assert _place(policy, [], decodes, demand=single).plan is Plan.LOCAL
    closed = [replace(decodes[0], is_handoff_target=False)]
    assert _place(policy, prefills, closed, plan=remote).plan is Plan.LOCAL
    other = [replace(decodes[0], layout=replace(LAYOUT, num_layers=2))]
    assert _place(policy, prefills, other, plan=remote).plan is Plan.LOCAL
    config = RouterConfig(policy=policy)
    assert place(Demand(100), prefills, [], config, Draw(random.Random(0))) is None


@pytest.mark.parametrize("policy", SIMPLE)
def test_simple_policies_split_whenever_there_is_a_prefill_worker(policy: PolicySetting) -> None:
    assert _place(policy, _ps("p", "q"), _ds("d", "e")).plan is Plan.REMOTE
