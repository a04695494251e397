"""The cheapest way wins, the rules hold whatever it costs, and the terms say why."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost
from router.config import PlanSetting, PolicySetting, RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.placement import place
from router.speeds import Handoff
from tests.unit.router.scripted import LAYOUT, new_status

AUTO = RouterConfig()


def _worker(role: Role, name: str, load: dict[str, Any] | None = None, **fields: Any) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    return Candidate(ref, LAYOUT, new_status(ref, **(load or {})), **fields)


def _p(name: str = "p", load: dict[str, Any] | None = None, **fields: Any) -> Candidate:
    return _worker(Role.PREFILL, name, load, **fields)


def _d(name: str = "d", load: dict[str, Any] | None = None, **fields: Any) -> Candidate:
    return _worker(Role.DECODE, name, load, **fields)


def _place(
    demand: Demand,
    prefills: list[Candidate],
    decodes: list[Candidate],
    config: RouterConfig = AUTO,
    seed: int = 0,
) -> Decision:
    decision = place(demand, prefills, decodes, config, Draw(random.Random(seed)))
    assert decision is not None
    return decision


def _names(decision: Decision) -> tuple[str | None, str | None]:
    return tuple(found.ref.worker_id if found else None for found in (decision.prefill, decision.decode))  # type: ignore[return-value]


def test_a_prompt_is_read_remotely_where_it_would_hold_up_streams_and_locally_where_none_are() -> None:
    assert _place(Demand(200), [_p()], [_d(num_streams=4)]).plan is Plan.REMOTE
    assert _place(Demand(200), [_p()], [_d()]).plan is Plan.LOCAL


def test_a_busy_prefill_worker_is_not_waited_for_when_decode_is_free() -> None:
    busy = _p(num_ahead_tokens=5000)
    assert _place(Demand(200), [busy], [_d()]).plan is Plan.LOCAL


def test_the_longest_cached_prefix_wins_among_equals() -> None:
    prefills = [_p("cold"), _p("warm", num_cached_tokens=160)]
    assert _names(_place(Demand(200), prefills, [_d()])) == ("warm", "d")


def test_load_outweighs_a_cached_prefix_when_it_costs_more() -> None:
    prefills = [_p("cold"), _p("warm", num_cached_tokens=160, num_ahead_tokens=400)]
    assert _names(_place(Demand(200), prefills, [_d(num_streams=4)])) == ("cold", "d")


def test_load_that_was_just_placed_counts_like_reported_load() -> None:
    prefills = [_p("taken", num_ahead_tokens=500), _p("free")]
    assert _names(_place(Demand(200), prefills, [_d(num_streams=4)]))[0] == "free"
    costly = {"alone": StepCost(0.01, 0.005, 0.01, 0.002)}
    decodes = [_d("taken", costly, num_seqs=4), _d("free", costly)]
    assert _names(_place(Demand(200), [_p()], decodes))[1] == "free"


def test_measured_rates_replace_the_assumed_one() -> None:
    slow, fast = ({"alone": StepCost(0.0, 0.0, 0.001, token_s)} for token_s in (0.02, 0.002))
    prefills = [_p("slow", slow), _p("fast", fast)]
    assert _names(_place(Demand(200), prefills, [_d(num_streams=4)]))[0] == "fast"


def test_a_decode_worker_without_room_is_the_last_choice() -> None:
    full = _d("full", load={"num_free_blocks": 2, "num_held_blocks": 62})
    assert _names(_place(Demand(40), [_p()], [full, _d("free")]))[1] == "free"
    assert _names(_place(Demand(40), [_p()], [full]))[1] == "full"


def test_evictable_cached_blocks_are_room() -> None:
    cached = _d("cached", load={"num_free_blocks": 0, "num_cached_blocks": 64})
    assert "slowdown" in _place(Demand(40), [_p()], [cached]).terms
    assert _place(Demand(40), [_p()], [cached]).terms["slowdown"] == 0


def test_with_all_full_blocks_on_decode_nothing_is_handed_over() -> None:
    warm = _d(num_cached_tokens=200, num_ahead_tokens=100_000, num_streams=4)
    assert _place(Demand(203), [_p()], [warm]).plan is Plan.LOCAL
    assert _place(Demand(203), [_p()], [replace(warm, num_cached_tokens=196)]).plan is Plan.REMOTE


def test_an_answer_of_one_token_needs_prefill_only() -> None:
    demand = Demand(200, is_ended_by_prefill=True)
    decision = _place(demand, [_p()], [_d()])
    assert decision.plan is Plan.PREFILL_ONLY
    assert decision.decode is None
    assert _place(demand, [_p()], []).plan is Plan.PREFILL_ONLY
    assert _place(demand, [], [_d()]).plan is Plan.LOCAL


@pytest.mark.parametrize(
    ("setting", "plan"), [(PlanSetting.REMOTE, Plan.REMOTE), (PlanSetting.LOCAL, Plan.LOCAL)]
)
def test_the_operator_may_force_the_plan_against_all_cost(setting: PlanSetting, plan: Plan) -> None:
    config = RouterConfig(plan=setting)
    for demand in (Demand(2), Demand(400)):
        warm = _d(num_cached_tokens=400)
        assert _place(demand, [_p(num_ahead_tokens=9999)], [warm], config).plan is plan


def test_a_forced_plan_that_is_impossible_gives_way() -> None:
    assert _place(Demand(50), [], [_d()], RouterConfig(plan=PlanSetting.REMOTE)).plan is Plan.LOCAL
    single = Demand(50, is_ended_by_prefill=True)
    assert _place(single, [_p()], [], RouterConfig(plan=PlanSetting.LOCAL)).plan is Plan.PREFILL_ONLY


def test_kv_goes_only_to_workers_whose_blocks_can_be_made_and_that_take_it() -> None:
    remote = RouterConfig(plan=PlanSetting.REMOTE)
    other = replace(_d("other"), layout=replace(LAYOUT, head_dim=2 * LAYOUT.head_dim))
    odd = replace(_d("odd"), layout=replace(LAYOUT, block_size=LAYOUT.block_size + 1))
    larger = replace(_d("larger"), layout=replace(LAYOUT, block_size=2 * LAYOUT.block_size))
    closed = _d("closed", is_handoff_target=False)
    assert _place(Demand(50), [_p()], [other], remote).plan is Plan.LOCAL
    assert _place(Demand(50), [_p()], [odd], remote).plan is Plan.LOCAL
    assert _place(Demand(50), [_p()], [closed], remote).plan is Plan.LOCAL
    for policy in (PolicySetting.COST, PolicySetting.ROUND_ROBIN):
        found = _place(Demand(50), [_p()], [other, odd, larger], replace(remote, policy=policy))
        assert _names(found) == ("p", "larger")
    assert _names(_place(Demand(50), [_p()], [other, closed, _d("fit")], remote)) == ("p", "fit")


def test_without_a_decode_worker_nobody_can_answer() -> None:
    assert place(Demand(50), [_p()], [], AUTO, Draw(random.Random(0))) is None


def test_near_ties_are_broken_by_chance_and_chance_alone() -> None:
    costly = {"alone": StepCost(0.01, 0.005, 0.01, 0.002)}
    decodes = [_d("a", costly), _d("b", costly), _d("c", costly, num_streams=6)]
    found = {_names(_place(Demand(200), [_p()], decodes, seed=seed))[1] for seed in range(30)}
    assert found == {"a", "b"}
    same = {_names(_place(Demand(200), [_p()], decodes, seed=7))[1] for _ in range(5)}
    assert len(same) == 1


def test_the_terms_add_up_to_the_cost() -> None:
    remote = RouterConfig(plan=PlanSetting.REMOTE)
    decision = _place(Demand(200), [_p(num_ahead_tokens=50)], [_d()], remote)
    assert set(decision.terms) == {"queue", "prefill", "transfer", "handoff", "decode", "slowdown"}
    assert decision.cost_ms == pytest.approx(sum(decision.terms.values()))
    assert decision.terms["queue"] == pytest.approx(100.0)
    assert decision.terms["prefill"] == pytest.approx(400.0)


def test_a_worker_that_has_not_reported_yet_can_be_chosen() -> None:
    silent = replace(_d(num_streams=4), status=None)
    assert _names(_place(Demand(200), [replace(_p(), status=None)], [silent])) == ("p", "d")


_ALONE, _BESIDE = StepCost(0.010, 0.001, 0.010, 0.001), StepCost(0.020, 0.002, 0.020, 0.002)
_MEASURED = {"alone": _ALONE, "beside": _BESIDE, "max_step_tokens": 512, "max_chunk_tokens": 64}


def _on_cores(num_cores: int) -> dict[str, Any]:
    return {**_MEASURED, "num_shared_cores": num_cores}


def test_reading_remotely_beside_streams_is_free_on_another_host_and_not_on_the_same_cores() -> None:
    def plan(prefill_node: str, num_cores: int) -> Plan:
        prefill = _p(load=_on_cores(num_cores), node=prefill_node)
        decode = _d(load=_on_cores(num_cores), node="one", num_streams=7, num_active=7, num_seqs=7)
        return _place(Demand(32), [prefill], [decode]).plan

    assert plan("other", 2) is Plan.REMOTE
    assert plan("one", 2) is Plan.LOCAL
    assert plan("one", 0) is Plan.REMOTE, "workers that share a host but no cores, as GPUs"


def test_others_lose_what_the_shared_cores_do_for_us() -> None:
    remote = RouterConfig(plan=PlanSetting.REMOTE)
    prefill, idle = _p(load=_on_cores(2), node="one"), _d(load=_on_cores(2), node="one")
    alone = _place(Demand(100), [prefill], [idle], remote).terms
    assert alone["prefill"] == pytest.approx(10 + 100 * 1.0)
    assert alone["slowdown"] == pytest.approx(0.0)
    busy = replace(idle, num_streams=4, num_active=4, num_seqs=4)
    beside = _place(Demand(100, num_output_tokens=10), [prefill], [busy], remote).terms
    assert beside["prefill"] == pytest.approx(20 + 100 * 2.0)
    assert beside["slowdown"] == pytest.approx(220 * 4 * 0.5 + 10 * 1.0 * 4)


def test_chunks_between_steps_cost_each_stream_the_chunk_and_us_the_streams() -> None:
    local = RouterConfig(plan=PlanSetting.LOCAL)
    decode = _d(load=_on_cores(2), node="one", num_streams=3, num_active=3, num_seqs=3)
    terms = _place(Demand(128, num_output_tokens=10), [], [decode], local).terms
    assert terms["prefill"] == pytest.approx(2 * (10 + 3 * 1.0) + 128 * 1.0)
    assert terms["queue"] == pytest.approx(13 / 2)
    assert terms["slowdown"] == pytest.approx(3 * 128 * 1.0 + 10 * 1.0 * 3)


def test_a_full_worker_is_waited_for_if_that_is_cheaper_and_not_for_ever() -> None:
    warm = _d("warm", load=_MEASURED, num_cached_tokens=8000, num_streams=8, num_active=8, num_seqs=8)
    cold = _d("cold", load={**_MEASURED, "num_blocks": 4096, "num_free_blocks": 4096})
    decision = _place(Demand(8004), [], [warm, cold])
    assert (decision.plan, _names(decision)) == (Plan.WAIT, (None, "warm"))
    assert decision.terms["wait"] > 0
    assert decision.cost_ms == pytest.approx(sum(decision.terms.values()))
    assert [other.plan for other in decision.others] == [Plan.LOCAL]
    assert decision.cost_ms < decision.others[0].cost_ms
    assert _place(Demand(8004, can_wait=False), [], [warm, cold]).plan is Plan.LOCAL
    assert _place(Demand(44), [], [warm, cold]).plan is Plan.LOCAL, "reading little is cheaper than waiting"


def test_a_learned_handoff_and_a_slow_pace_count() -> None:
    decode = _d(load=_MEASURED, num_streams=2, num_active=2, num_seqs=2)
    slow_bridge = _p("slow", load=_MEASURED, handoffs={WorkerId("d"): Handoff(900.0, 0.0)})
    slow_reader = _p("late", load=_MEASURED, pace=1.5)
    remote = RouterConfig(plan=PlanSetting.REMOTE)
    assert _names(_place(Demand(400), [slow_bridge, _p("fit", load=_MEASURED)], [decode], remote))[0] == "fit"
    assert _names(_place(Demand(400), [slow_reader, _p("fit", load=_MEASURED)], [decode], remote))[0] == "fit"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_pruned_pairs_hold_the_best_of_all(data: st.DataObject) -> None:
    """With equal handoffs a pair's cost is a sum over its two workers, so the cheapest of each are enough."""
    counts = st.integers(0, 2000)
    prefills = [_p(f"p{i}", load=_MEASURED, num_ahead_tokens=data.draw(counts)) for i in range(20)]
    decodes = [
        _d(f"d{i}", load={**_MEASURED, "max_num_seqs": 9999}, num_streams=n, num_active=n, num_seqs=n)
        for i, n in enumerate(data.draw(st.lists(st.integers(0, 50), min_size=20, max_size=20)))
    ]
    remote = RouterConfig(plan=PlanSetting.REMOTE, tie_ms=0.0)
    found = _place(Demand(300), prefills, decodes, remote)
    singles = (_place(Demand(300), [p], [d], remote).cost_ms for p in prefills for d in decodes)
    assert found.cost_ms == pytest.approx(min(singles))


_LONG = Demand(400)
_BUSY = {"alone": StepCost(0.01, 0.005, 0.02, 0.002), "beside": StepCost(0.01, 0.005, 0.02, 0.002)}


def _holder(name: str = "d", num_tokens: int = 360, **fields: Any) -> Candidate:
    """A decode worker that has most of the prompt, and streams that reading the rest would hold up."""
    return _d(
        name, _BUSY, num_cached_tokens=num_tokens, num_told_tokens=num_tokens, **{"num_streams": 6, **fields}
    )


def test_what_decode_holds_is_pulled_where_that_costs_less_than_reading_it() -> None:
    decision = _place(_LONG, [_p("p", _BUSY)], [_holder()])
    assert decision.plan is Plan.REMOTE
    assert decision.pull_from is not None
    assert decision.pull_from.ref.worker_id == "d"
    assert decision.num_cached_tokens == 360
    assert decision.terms["pull"] == pytest.approx(AUTO.assumed_handoff_ms, abs=1.0)
    others = {other.plan: other for other in decision.others}
    assert decision.cost_ms < others[Plan.LOCAL].cost_ms
    alone = _place(_LONG, [_p("p", _BUSY)], [_holder()], replace(AUTO, pull_timeout_s=0.0))
    assert alone.pull_from is None
    assert decision.cost_ms < alone.cost_ms
    assert decision.cost_ms == pytest.approx(sum(decision.terms.values()))


def test_a_pull_is_not_worth_more_than_it_saves() -> None:
    slow = {WorkerId("p"): Handoff(10_000.0, 0.0)}
    assert _place(_LONG, [_p("p", _BUSY)], [_holder(handoffs=slow)]).pull_from is None
    assert _place(_LONG, [_p("p", _BUSY, num_cached_tokens=360)], [_holder()]).pull_from is None
    expected = _d("d", _BUSY, num_cached_tokens=360, num_streams=6)  # it is still being read there
    assert _place(_LONG, [_p("p", _BUSY)], [expected]).pull_from is None


def test_what_another_decode_worker_holds_may_be_pulled_for_the_one_that_answers() -> None:
    full = _holder("full", num_seqs=8)
    free = _d("free", {**_BUSY, "num_blocks": 1000, "num_free_blocks": 1000}, num_streams=6)
    decision = _place(_LONG, [_p("p", _BUSY)], [full, free])
    assert _names(decision) == ("p", "free")
    assert decision.pull_from is not None
    assert decision.pull_from.ref.worker_id == "full"


def test_the_holder_of_most_is_asked() -> None:
    holders = [_holder("little", 40), _holder("most", 380), _holder("some", 200)]
    decision = _place(_LONG, [_p("p", _BUSY)], holders)
    assert decision.pull_from is not None
    assert decision.pull_from.ref.worker_id == "most"


_ROOMY = {"max_num_seqs": 64, "num_blocks": 4096, "num_free_blocks": 4096}


def _prompts_of_one_beginning(num: int, load: dict[str, Any]) -> list[int]:
    """Requests that each of three decode workers gets, sorted, if all that come stay and the first one alone
    has what they begin with.
    """
    numbers = [0, 0, 0]
    for seed in range(num):
        decodes = [
            _d(f"d{i}", load, num_seqs=numbers[i], num_streams=numbers[i], num_cached_tokens=480 * (i == 0))
            for i in range(3)
        ]
        decision = _place(Demand(512, num_output_tokens=128), [], decodes, seed=seed)
        assert decision.decode is not None
        numbers[int(decision.decode.ref.worker_id[1:])] += 1
        assert decision.cost_ms == pytest.approx(sum(decision.terms.values()))
    return sorted(numbers)


def test_a_popular_beginning_does_not_draw_everyone_to_the_worker_that_has_it() -> None:
    free_streams = {**_ROOMY, "alone": StepCost(0.001, 0.0, 0.001, 0.0002)}
    assert _prompts_of_one_beginning(3, free_streams) == [0, 0, 3]
    least, _, most = _prompts_of_one_beginning(18, free_streams)
    assert least >= 2
    assert most <= 9


def test_a_prefix_that_saves_more_than_the_answer_takes_is_not_read_again_for_balance() -> None:
    load = {**_ROOMY, "alone": StepCost(0.001, 0.0, 0.001, 0.002)}
    warm = _d("warm", load, num_seqs=12, num_streams=12, num_cached_tokens=480)
    cold = _d("cold", load)
    assert _place(Demand(512, num_output_tokens=1200), [], [warm, cold]).decode is cold
    assert _place(Demand(512, num_output_tokens=8), [], [warm, cold]).decode is warm
