"""How prefills end before their time: late, refused, failed, drained. Nothing leaks, nothing hangs."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Overloaded,
    ServingError,
    StepFailed,
    TransferTimeout,
    WorkerDraining,
    WrongRole,
)
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from core.jobs import GenerateJob, PrefillResult, SampleStart
from engine.step import StepOutput, StepPlan
from kv_transfer.config import BridgeConfig
from tests.integration.prefill_worker.conftest import MakeSite, prompt_ids
from tests.oracle import oracle_greedy

LONG = 480


async def test_a_failing_step_fails_its_prompts_and_the_worker_goes_on(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await make_site(max_num_seqs=2)
    run = site.runner.run

    def run_until_it_breaks(plan: StepPlan) -> StepOutput:
        if any(item.sequence.request.request_id == "bad" for item in plan.scheduled):
            raise ValueError("a prompt's secret")
        return run(plan)

    monkeypatch.setattr(site.runner, "run", run_until_it_breaks)
    bad = site.job(prompt_ids(40), request_id="bad")
    with pytest.raises(StepFailed) as caught:
        await site.worker.prefill(bad)
    assert "secret" not in caught.value.message
    result = await site.worker.prefill(site.job(prompt_ids(30)))
    assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, prompt_ids(30), 1)
    await site.settle()
    assert site.worker.is_healthy()
    assert site.value("baton_sequences_finished_total", reason="error") == 1
    assert bad.ticket_id not in site.decode.arrivals or bad.ticket_id in site.decode.tombstones


async def test_a_prompt_that_breaks_a_step_does_not_take_its_neighbours_along(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await make_site(max_num_seqs=8, token_budget=64)
    run, steps = site.runner.run, list[set[str]]()

    def run_and_record(plan: StepPlan) -> StepOutput:
        steps.append({item.sequence.request.request_id for item in plan.scheduled})
        return run(plan)

    monkeypatch.setattr(site.runner, "run", run_and_record)
    ahead = site.job(prompt_ids(LONG), request_id="ahead")  # while it is read, the others gather
    # a penalty below float32's range makes this prompt's logits infinite, and nobody else's
    poison = site.job(prompt_ids(9), request_id="poison", repetition_penalty=1e-45)
    before, after = (site.job(prompt_ids(n), request_id=str(n)) for n in (10, 11))
    site.gate.hold()
    calls = [asyncio.create_task(site.worker.prefill(job)) for job in (ahead, before, poison, after)]
    await site.gate.reached()
    site.gate.release()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(step >= {"10", "poison", "11"} for step in steps)
    assert isinstance(results.pop(2), StepFailed)
    for result, length in zip(results, (LONG, 10, 11), strict=True):
        assert isinstance(result, PrefillResult)
        assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, prompt_ids(length), 1)
    await site.settle()


@pytest.mark.parametrize("where", ["computing", "waiting for the grant"])
async def test_a_deadline_ends_the_call_in_time_and_aborts_the_ticket(
    make_site: MakeSite, where: str
) -> None:
    is_computing = where == "computing"
    site = await make_site(token_budget=1 if is_computing else 512)
    if is_computing:
        site.gate.hold(after=1)
    else:
        site.decode.door.clear()
    job = site.job(prompt_ids(LONG), time_left_s=1.0)
    started = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await site.worker.prefill(job)
    assert 1.0 <= asyncio.get_running_loop().time() - started < 3.0
    assert site.value("baton_sequences_finished_total", reason="handed_over") == (0 if is_computing else 1)
    site.gate.release()
    site.decode.door.set()
    await site.settle()
    # a prompt that is handed over ends in a small step of its own
    assert site.gate.num_steps == 2, "the step that had begun was the last"
    assert job.ticket_id in site.decode.tombstones


async def test_a_job_without_time_is_late_already(make_site: MakeSite) -> None:
    site = await make_site()
    with pytest.raises(DeadlineExceeded):
        await site.worker.prefill(site.job(prompt_ids(20), time_left_s=0.0))
    await site.settle()


async def test_a_decode_worker_that_never_answers_is_given_up_before_the_deadline(
    make_site: MakeSite,
) -> None:
    bridge = BridgeConfig(keepalive_s=0.05, silence_s=0.2, abort_s=0.2)
    site = await make_site(bridge=bridge)
    site.decode.door.clear()
    with pytest.raises(TransferTimeout):
        await site.worker.prefill(site.job(prompt_ids(20), time_left_s=20.0))
    site.decode.door.set()
    await site.settle()


async def test_a_decode_worker_that_does_not_exist_is_an_error_and_frees_everything(
    make_site: MakeSite,
) -> None:
    site = await make_site(bridge=BridgeConfig(keepalive_s=0.05, silence_s=0.2, abort_s=0.2))
    gone = WorkerRef(WorkerId("gone"), Role.DECODE, new_epoch(), "loopback:gone")
    job = site.job(prompt_ids(20))
    with pytest.raises(ServingError) as caught:
        await site.worker.prefill(type(job)(job.request, job.samples, job.ticket_id, gone, 0, 20.0))
    assert caught.value.retryable
    await site.settle()


async def test_prompts_beyond_the_queue_are_refused_with_a_time_and_the_others_are_served(
    make_site: MakeSite,
) -> None:
    site = await make_site(max_num_seqs=1, max_waiting=2, token_budget=16)
    jobs = [site.job(prompt_ids(200, seed), request_id=f"r{seed}") for seed in range(8)]
    site.gate.hold()
    calls = [asyncio.create_task(site.worker.prefill(jobs[0]))]
    await site.gate.reached()
    calls += [asyncio.create_task(site.worker.prefill(job)) for job in jobs[1:]]
    await site.gate.step()
    site.gate.release()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, PrefillResult) for result in results[:3])
    for error in results[3:]:
        assert isinstance(error, Overloaded)
        assert 1.0 <= float(error.details["retry_after_s"] or 0) <= 60.0
    await site.settle()


async def test_prompts_that_can_never_run_are_refused_at_once(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=4)
    for num_tokens in (65, 512, 600):
        with pytest.raises(ContextTooLong):
            await site.worker.prefill(site.job(prompt_ids(num_tokens)))
    await site.settle()
    assert site.decode.offers == []


async def test_an_ill_formed_ticket_is_an_error_of_the_call(make_site: MakeSite) -> None:
    site = await make_site()
    job = site.job(prompt_ids(20))
    with pytest.raises(ServingError):
        await site.worker.prefill(type(job)(job.request, job.samples, "short", job.decode, 0, 20.0))
    await site.settle()


async def test_draining_finishes_what_runs_and_refuses_what_comes(make_site: MakeSite) -> None:
    site = await make_site(token_budget=4)
    site.gate.hold(after=1)
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(100))))
    await site.gate.reached()
    draining = asyncio.create_task(site.worker.drain(30.0))
    await site.gate.step()
    with pytest.raises(WorkerDraining):
        await site.worker.prefill(site.job(prompt_ids(20)))
    assert not draining.done()
    site.gate.release()
    await draining
    assert len((await call).deltas) == 1
    await site.settle()


async def test_a_prompt_that_comes_just_before_its_worker_leaves_is_refused_and_holds_nothing(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    # both in one turn of the loop: the call has passed the door, and is heard of behind the drain
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(40))))
    leaving = asyncio.create_task(site.worker.leave(5.0))
    with pytest.raises(WorkerDraining):
        await call
    assert await leaving
    assert site.runner.cache.allocator.num_held == 0
    assert site.worker.num_calls == 0


async def test_what_a_drain_cannot_finish_in_time_is_given_back(make_site: MakeSite) -> None:
    site = await make_site(token_budget=1)
    job = site.job(prompt_ids(LONG))
    site.gate.hold(after=1)
    call = asyncio.create_task(site.worker.prefill(job))
    await site.gate.reached()
    draining = asyncio.create_task(site.worker.drain(0.05))
    await site.gate.step()
    await draining
    with pytest.raises(WorkerDraining):
        await call
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 3, "the step that had begun was the last"
    assert job.ticket_id in site.decode.tombstones


async def test_a_prefill_worker_does_not_generate(make_site: MakeSite) -> None:
    site = await make_site()
    job = GenerateJob(site.job(prompt_ids(20)).request, (SampleStart(0),), None, attempt=0, time_left_s=1.0)
    with pytest.raises(WrongRole):
        site.worker.generate(job)
