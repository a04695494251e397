"""Near pairs are preferred: one node before one zone before another, until a pair has measured better."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from router.config import PlanSetting, RouterConfig
from router.decision import Candidate, Demand, Draw
from router.placement import place
from router.speeds import Handoff
from tests.unit.router.scripted import LAYOUT, new_status

REMOTE = RouterConfig(plan=PlanSetting.REMOTE, tie_ms=0.0)
BIG = replace(LAYOUT, num_layers=64, num_kv_heads=8, head_dim=128)


def _worker(role: Role, name: str, node: str, zone: str) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    return Candidate(ref, BIG, new_status(ref, num_blocks=4096, num_free_blocks=4096), node=node, zone=zone)


def _p(node: str, zone: str = "a") -> Candidate:
    return _worker(Role.PREFILL, f"p-{node}", node, zone)


def _d(node: str, zone: str = "a") -> Candidate:
    return _worker(Role.DECODE, f"d-{node}", node, zone)


def _went(prefills: list[Candidate], decodes: list[Candidate]) -> tuple[str, str]:
    decision = place(Demand(200), prefills, decodes, REMOTE, Draw(random.Random(0)))
    assert decision is not None
    assert decision.prefill is not None
    assert decision.decode is not None
    return decision.prefill.ref.worker_id, decision.decode.ref.worker_id


@pytest.mark.parametrize("order", [1, -1])
def test_a_pair_of_one_node_goes_before_a_pair_of_one_zone_and_that_before_any_other(order: int) -> None:
    decodes = [_d("n1"), _d("n2"), _d("n3", "b")][::order]
    assert _went([_p("n1")], decodes) == ("p-n1", "d-n1")
    assert _went([_p("n4")], [decode for decode in decodes if decode.node != "n1"]) == ("p-n4", "d-n2")
    assert _went([_p("n5", "b")], decodes) == ("p-n5", "d-n3")


def test_what_a_pair_has_measured_counts_instead() -> None:
    fast = replace(_p("n1"), handoffs={WorkerId("d-n3"): Handoff(0.1, 0.0)})
    assert _went([fast], [_d("n1"), _d("n3", "b")]) == ("p-n1", "d-n3")


def test_load_outweighs_nearness() -> None:
    busy = _d("n1")
    assert busy.status is not None
    full = replace(busy, num_seqs=busy.status.max_num_seqs)
    assert _went([_p("n1")], [full, _d("n2")]) == ("p-n1", "d-n2")
