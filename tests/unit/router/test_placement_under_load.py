"""Under load it counts what is read, for those who come later wait for it, and nobody waits behind long
prompts alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost
from router.config import RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.placement import place
from tests.unit.router.scripted import LAYOUT, new_status

_GPU = StepCost(decode_s=0.007, stream_s=2e-5, prefill_s=0.007, token_s=3e-5, kv_s=5e-8, pair_s=1e-9)
_ROOM = {
    "num_free_blocks": 100_000,
    "num_blocks": 100_000,
    "max_num_seqs": 128,
    "max_step_tokens": 2048,
    "max_chunk_tokens": 512,
}


def _worker(role: Role, name: str, num_streams: int = 0, num_waiting: int = 0, **fields: Any) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    num_seqs = num_streams + num_waiting
    return Candidate(
        ref,
        LAYOUT,
        new_status(ref, alone=_GPU, **_ROOM),
        num_streams=num_streams,
        num_active=num_seqs,
        num_seqs=num_seqs,
        num_kv_tokens=10_000 * num_streams,
        **fields,
    )


def _place(demand: Demand, prefills: list[Candidate], decodes: list[Candidate]) -> Decision:
    decision = place(demand, prefills, decodes, RouterConfig(), Draw(random.Random(0)))
    assert decision is not None
    return decision


def _reader(decision: Decision) -> str:
    return decision.reader.ref.worker_id


@pytest.mark.parametrize("num_tokens", [1_000, 20_000, 80_000])
def test_a_prompt_of_any_length_goes_where_it_is_read_first_not_where_few_streams_run(
    num_tokens: int,
) -> None:
    few = _worker(Role.DECODE, "few", 2, 1, num_ahead_tokens=60_000)
    many = _worker(Role.DECODE, "many", 12)
    assert _reader(_place(Demand(num_tokens), [], [few, many])) == "many"


def test_the_more_requests_there_are_the_longer_a_cached_prefix_is_waited_for() -> None:
    def reader(num_streams: int) -> str:
        warm = _worker(Role.DECODE, "warm", num_streams, 1, num_ahead_tokens=40_000, num_cached_tokens=8_000)
        return _reader(_place(Demand(12_000), [], [warm, _worker(Role.DECODE, "cold", num_streams)]))

    assert reader(1) == "cold"
    assert reader(12) == "warm"


def test_prefill_workers_with_a_line_of_prompts_save_reading_too() -> None:
    def reader(num_waiting: int) -> str:
        warm = _worker(Role.PREFILL, "warm", 0, num_waiting, num_ahead_tokens=12_000, num_cached_tokens=4_000)
        cold = _worker(Role.PREFILL, "cold", 0, num_waiting)
        decode = _worker(Role.DECODE, "d", 60, num_ahead_tokens=500_000)
        return _reader(_place(Demand(8_000), [warm, cold], [decode]))

    assert reader(1) == "cold"
    assert reader(12) == "warm"


def test_where_streams_have_a_price_it_keeps_the_balance_and_a_prefix_still_counts() -> None:
    warm = _worker(Role.DECODE, "warm", 12, num_cached_tokens=9_600)
    decision = _place(Demand(10_000, num_output_tokens=128), [], [warm, _worker(Role.DECODE, "cold", 4)])
    assert decision.plan is Plan.LOCAL
    assert _reader(decision) == "warm"
    assert "crowding" not in decision.terms


def test_a_popular_beginning_is_read_elsewhere_once_its_holder_has_many_more_streams() -> None:
    numbers = [0, 0, 0]
    for _ in range(150):
        decodes = [
            _worker(Role.DECODE, f"d{i}", numbers[i], num_cached_tokens=480 * (i == 0)) for i in range(3)
        ]
        numbers[int(_reader(_place(Demand(512, num_output_tokens=128), [], decodes))[1:])] += 1
    assert min(numbers) >= 20, numbers


@pytest.mark.parametrize(("num_ahead_tokens", "plan"), [(30_000, Plan.REMOTE), (78_000, Plan.LOCAL)])
def test_streams_have_something_to_show_and_lose_half_of_what_a_waiting_prompt_does(
    num_ahead_tokens: int, plan: Plan
) -> None:
    """Reading 10,000 tokens beside ten streams costs them 3.5 s in sum; to wait for P takes 1 s or 2.6 s."""
    prefill = _worker(Role.PREFILL, "p", num_ahead_tokens=num_ahead_tokens)
    decode = _worker(Role.DECODE, "d", 10)
    assert _place(Demand(10_000), [prefill], [decode]).plan is plan
