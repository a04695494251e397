"""What a step attends to has its price: long contexts weigh more than their tokens."""

from __future__ import annotations

import random
from typing import Any

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost, num_pairs
from router.config import RouterConfig
from router.decision import Candidate, Decision, Demand, Draw
from router.placement import place
from tests.unit.router.scripted import LAYOUT, new_status

_GPU = StepCost(decode_s=0.007, stream_s=2e-5, prefill_s=0.007, token_s=3e-5, kv_s=5e-8, pair_s=1e-9)
_ROOM = {"num_free_blocks": 100_000, "num_blocks": 100_000}


def _worker(role: Role, name: str, cost: StepCost = _GPU, **fields: Any) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    return Candidate(ref, LAYOUT, new_status(ref, alone=cost, **_ROOM), **fields)


def _place(demand: Demand, prefills: list[Candidate], decodes: list[Candidate]) -> Decision:
    decision = place(demand, prefills, decodes, RouterConfig(), Draw(random.Random(0)))
    assert decision is not None
    return decision


def test_of_two_queues_of_equal_tokens_the_one_with_short_contexts_is_shorter() -> None:
    long = _worker(Role.PREFILL, "long", num_ahead_tokens=32_768, num_ahead_pairs=num_pairs(32_768, 0))
    short = _worker(Role.PREFILL, "short", num_ahead_tokens=32_768, num_ahead_pairs=16 * num_pairs(2_048, 0))
    busy = _worker(Role.DECODE, "d", num_streams=64, num_seqs=64, num_ahead_tokens=100_000)
    chosen = _place(Demand(4_000), [long, short], [busy]).prefill
    assert chosen is not None
    assert chosen.ref.worker_id == "short"


def test_of_two_batches_of_equal_streams_the_one_with_less_kv_is_faster() -> None:
    reader = _worker(Role.PREFILL, "p")
    decodes = [
        _worker(Role.DECODE, "long", num_streams=8, num_seqs=8, num_kv_tokens=400_000),
        _worker(Role.DECODE, "short", num_streams=8, num_seqs=8, num_kv_tokens=16_000),
    ]
    chosen = _place(Demand(4_000), [reader], decodes).decode
    assert chosen is not None
    assert chosen.ref.worker_id == "short"


def test_a_long_prompt_costs_more_than_its_tokens_do() -> None:
    reader, decode = _worker(Role.PREFILL, "p"), _worker(Role.DECODE, "d", num_streams=64, num_seqs=64)
    short = _place(Demand(1_000), [reader], [decode]).terms["prefill"]
    long = _place(Demand(64_000), [reader], [decode]).terms["prefill"]
    assert long > 1.5 * 64 * short
