"""A small deployment and a small workload for the simulator's tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from cluster.loadtest.traces import TraceRecord
from cluster.simulator.deployment import Deployment
from cluster.simulator.simulation import Outcome, Simulation
from cluster.simulator.step_price import LinkPrice, StepPrice
from cluster.simulator.workload import Arrival, arrivals_of
from core.kv_layout import KVLayout
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

LAYOUT = KVLayout("model", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
SMALL = Deployment(
    layout=LAYOUT,
    num_blocks=1_000,
    price=StepPrice(fixed_s=0.006, token_s=30e-6, pair_s=1e-9, stream_s=20e-6, kv_s=50e-9),
    link=LinkPrice(bytes_per_s=25e9),
    num_prefill=2,
    num_decode=2,
    max_context=16_384,
    prefill=PrefillConfig(token_budget=2048),
    decode=DecodeConfig(max_num_seqs=16, token_budget=512, prefill_chunk=256),
    router=RouterConfig(pull_timeout_s=0.0),
)


def deployment(**changes: Any) -> Deployment:
    """`SMALL`, but for some fields."""
    return replace(SMALL, **changes)


def conversations(num_requests: int, rate: float = 4.0, seed: int = 0) -> list[Arrival]:
    """Prompts of one to eight trace blocks that all begin alike and often go on like an earlier one."""
    chance = random.Random(seed)
    known: list[tuple[int, ...]] = [(0,)]
    records, now, fresh = [], 0.0, 1
    for _ in range(num_requests):
        now += chance.expovariate(rate)
        ids = chance.choice(known)
        num_new = chance.randrange(1, 4)
        ids = (*ids[: 8 - num_new], *range(fresh, fresh + num_new))
        fresh += num_new
        known.append(ids)
        num_tokens = (len(ids) - 1) * 512 + chance.randrange(1, 513)
        records.append(TraceRecord(now, num_tokens, chance.randrange(1, 200), ids))
    return arrivals_of(records)


def played(arrivals: list[Arrival], seed: int = 0, **changes: Any) -> Outcome:
    return Simulation(deployment(**changes), seed).play(arrivals)
