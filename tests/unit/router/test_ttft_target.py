"""With a target for first tokens: who can meet it does, who cannot gives way for a while."""

from __future__ import annotations

import random
from typing import Any

import pytest

from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import StepCost
from router.config import RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.placement import place
from router.worker_entry import Reservation, WorkerEntry
from tests.unit.router.pipeline_fleet import decode_worker
from tests.unit.router.scripted import LAYOUT, Fleet, ScriptedWorker, new_request, new_status

_GPU = StepCost(decode_s=0.007, stream_s=2e-5, prefill_s=0.007, token_s=3e-5, kv_s=5e-8, pair_s=1e-9)
_TARGET = RouterConfig(ttft_target_s=4.0)
_LONG = 100_000  # takes 8 s to read


def _worker(role: Role, name: str, **fields: Any) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    status = new_status(
        ref,
        alone=_GPU,
        num_free_blocks=100_000,
        num_blocks=100_000,
        max_num_seqs=128,
        max_step_tokens=2048,
        max_chunk_tokens=512,
    )
    return Candidate(ref, LAYOUT, status, **fields)


def _d(name: str, num_ahead: int, **fields: Any) -> Candidate:
    return _worker(Role.DECODE, name, num_ahead_tokens=num_ahead, **fields)


def _place(demand: Demand, decodes: list[Candidate], config: RouterConfig = _TARGET) -> Decision:
    decision = place(demand, [], decodes, config, Draw(random.Random(0)))
    assert decision is not None
    return decision


def test_a_cached_prefix_is_not_waited_for_beyond_the_target() -> None:
    busy = {"num_streams": 12, "num_active": 12, "num_seqs": 12}
    warm = _d("warm", 100_000, num_cached_tokens=20_000, **busy)
    cold = _d("cold", 0, **busy)
    demand = Demand(24_000, waited_ms=0.0)
    assert _place(demand, [warm, cold], RouterConfig()).reader is warm
    assert _place(demand, [warm, cold]).reader is cold


def test_without_a_way_in_time_the_cheapest_is_taken() -> None:
    decision = _place(Demand(10_000, waited_ms=0.0), [_d("a", 300_000), _d("b", 200_000)])
    assert decision.plan is Plan.LOCAL
    assert decision.reader.ref.worker_id == "b"


def test_a_prompt_that_is_late_in_any_case_waits_for_what_is_ahead_in_the_router() -> None:
    decision = _place(Demand(_LONG, waited_ms=0.0), [_d("a", 50_000)])
    plain = _place(Demand(_LONG, waited_ms=0.0), [_d("a", 50_000)], RouterConfig())
    assert decision.plan is Plan.WAIT
    assert decision.gives_way
    assert decision.terms["queue"] == 0.0
    assert decision.terms["wait"] == plain.terms["queue"]
    assert decision.cost_ms == pytest.approx(plain.cost_ms)


@pytest.mark.parametrize(
    ("demand", "num_ahead"),
    [
        pytest.param(Demand(_LONG, waited_ms=0.0), 0, id="nobody is ahead"),
        pytest.param(Demand(_LONG, waited_ms=0.0), 2_000, id="little is ahead"),
        pytest.param(Demand(_LONG, waited_ms=60_000.0), 50_000, id="it has waited long"),
        pytest.param(Demand(_LONG), 50_000, id="its first token has been sent"),
        pytest.param(Demand(20_000, waited_ms=0.0), 200_000, id="it could be in time elsewhere"),
    ],
)
def test_it_does_not_give_way_if(demand: Demand, num_ahead: int) -> None:
    decision = _place(demand, [_d("a", num_ahead)])
    assert decision.plan is Plan.LOCAL
    assert not decision.gives_way


def test_what_could_have_been_in_time_and_has_waited_gives_way_too() -> None:
    assert not _place(Demand(20_000, waited_ms=0.0), [_d("a", 50_000)]).gives_way
    assert _place(Demand(20_000, waited_ms=3_900.0), [_d("a", 50_000)]).gives_way


def test_without_a_target_nobody_gives_way() -> None:
    assert _place(Demand(_LONG, waited_ms=0.0), [_d("a", 500_000)], RouterConfig()).plan is Plan.LOCAL


@pytest.mark.parametrize("target_s", [0.0, -1.0])
def test_a_target_must_be_above_0(target_s: float) -> None:
    with pytest.raises(ValueError, match="ttft_target_s"):
        RouterConfig(ttft_target_s=target_s)


def _new_fleet() -> tuple[Fleet, ScriptedWorker]:
    """One decode worker; each prompt takes 0.52 s to read, and is late in any case."""
    worker = decode_worker()
    return Fleet(worker, ttft_target_s=0.001, assumed_step_s=0.5), worker


def _fill(fleet: Fleet) -> tuple[WorkerEntry, Reservation]:
    """100 s of reading are ahead."""
    (entry,) = fleet.table.entries()
    ahead = Reservation(50_000, 1, fleet.time.now())
    entry.reserve(ahead)
    return entry, ahead


@pytest.mark.parametrize(("timeout_s", "after_s"), [(60.0, 5.2), (3.0, 1.6)])
async def test_who_gives_way_is_sent_after_six_times_its_reading_or_in_its_second_half(
    timeout_s: float, after_s: float
) -> None:
    fleet, worker = _new_fleet()
    async with fleet:
        _fill(fleet)
        task, _ = fleet.begin(new_request(), timeout_s=timeout_s)
        await fleet.pass_by(1.4)
        assert not worker.generates
        await fleet.pass_by(after_s - 1.4)
        assert len(worker.generates) == 1
        await task


async def test_who_gives_way_is_sent_once_little_is_ahead() -> None:
    fleet, worker = _new_fleet()
    async with fleet:
        entry, ahead = _fill(fleet)
        task, _ = fleet.begin(new_request())
        await fleet.pass_by(1.0)
        assert not worker.generates
        entry.release(ahead)
        await fleet.pass_by(1.1)
        assert len(worker.generates) == 1
        await task
