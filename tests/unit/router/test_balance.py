"""On cores that workers share a burst is not one worker's, though by the prices that would be cheapest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost
from router.config import PlanSetting, RouterConfig
from router.decision import Candidate, Decision, Demand, Draw
from router.placement import place
from tests.unit.router.scripted import LAYOUT, new_status

# half a second for 512 tokens of a prompt
_CPU = StepCost(decode_s=0.006, stream_s=2e-4, prefill_s=0.01, token_s=1e-3)
_ROOM = {
    "num_free_blocks": 10_000,
    "num_blocks": 10_000,
    "max_step_tokens": 512,
    "max_chunk_tokens": 256,
    "num_shared_cores": 2,
}


_PROMPT = Demand(528)


def _worker(
    role: Role, name: str, num_seqs: int = 0, max_num_seqs: int = 64, status: bool = True, **fields: Any
) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    told = new_status(ref, alone=_CPU, max_num_seqs=max_num_seqs, **_ROOM) if status else None
    return Candidate(ref, LAYOUT, told, node="host", num_active=num_seqs, num_seqs=num_seqs, **fields)


def _place(
    decodes: Sequence[Candidate], demand: Demand = _PROMPT, plan: PlanSetting = PlanSetting.AUTO
) -> Decision:
    config = RouterConfig(plan=plan)
    decision = place(demand, [_worker(Role.PREFILL, "p")], decodes, config, Draw(random.Random(0)))
    assert decision is not None
    return decision


def _where(decision: Decision) -> int:
    assert decision.decode is not None
    return int(decision.decode.ref.worker_id)


def _burst(num: int, num_prefixes: int) -> list[int]:
    """How many of `num` prompts that come at once, each with one of the beginnings of 512 tokens, each of
    three decode workers gets.
    """
    numbers, ahead, holders = [0, 0, 0], [0, 0, 0], [set[int]() for _ in range(3)]
    for i in range(num):
        prefix = i % num_prefixes
        cached = [512 * (prefix in holders[worker]) for worker in range(3)]
        chosen = _where(
            _place(
                [
                    _worker(
                        Role.DECODE,
                        str(w),
                        numbers[w],
                        num_ahead_tokens=ahead[w],
                        num_cached_tokens=cached[w],
                    )
                    for w in range(3)
                ]
            )
        )
        numbers[chosen] += 1
        ahead[chosen] += 528 - cached[chosen]
        holders[chosen].add(prefix)
    return numbers


@pytest.mark.parametrize("num_prefixes", [1, 9, 18])
def test_a_burst_is_spread_whether_its_prompts_share_a_beginning_or_not(num_prefixes: int) -> None:
    numbers = _burst(18, num_prefixes)
    assert max(numbers) <= 9, numbers
    assert min(numbers) >= 3, numbers


@pytest.mark.parametrize(("num_cached_tokens", "is_kept"), [(0, False), (512, False), (6_000, True)])
def test_the_longer_the_prefix_the_further_its_holder_may_lead(num_cached_tokens: int, is_kept: bool) -> None:
    holder = _worker(Role.DECODE, "0", 14, num_cached_tokens=num_cached_tokens)
    others = [_worker(Role.DECODE, "1", 3), _worker(Role.DECODE, "2", 3)]
    assert (_where(_place([holder, *others], Demand(7_000))) == 0) is is_kept


@pytest.mark.parametrize(
    "other",
    [
        _worker(Role.DECODE, "1", 1, max_num_seqs=1),
        _worker(Role.DECODE, "1", 0, is_handoff_target=False),
    ],
    ids=["full", "no handoff"],
)
def test_who_leads_is_no_worse_than_who_cannot_take_it(other: Candidate) -> None:
    leader = _worker(Role.DECODE, "0", 14)
    decision = _place([leader, other], plan=PlanSetting.REMOTE)
    assert _where(decision) == 0


def test_all_alike_stay_all_candidates() -> None:
    decodes = [_worker(Role.DECODE, str(i), 30) for i in range(3)]
    assert _where(_place(decodes)) in range(3)


def test_workers_with_cores_of_their_own_are_left_to_their_prices() -> None:
    """Its streams cost next to nothing, and the prefix saves all."""
    holder = _worker(Role.DECODE, "0", 9, num_cached_tokens=20_000, status=False)
    other = _worker(Role.DECODE, "1", status=False)
    assert _where(_place([holder, other], Demand(20_016))) == 0
