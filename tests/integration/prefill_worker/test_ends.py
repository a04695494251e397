"""How prefills end before their time: cancelled, late, refused, failed, drained. Nothing leaks, nothing
hangs.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ReservationRefused,
    ServingError,
    StepFailed,
    TransferCorrupt,
    TransferTimeout,
    WorkerDraining,
)
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.jobs import CancelJob, GenerateJob, PrefillJob, PrefillResult, SampleStart
from engine.step import StepOutput, StepPlan
from kv_transfer.config import BridgeConfig
from tests.doubles import FakeClock
from tests.integration.prefill_worker.conftest import MakeSite, prompt_ids
from tests.oracle import oracle_greedy

LONG = 480


@pytest.mark.parametrize("by", ["call", "ticket", "request"])
async def test_a_cancel_mid_prefill_stops_computing_and_frees_both_sides(
    make_site: MakeSite, by: str
) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(LONG))
    site.gate.hold(after=6)
    call = asyncio.create_task(site.worker.prefill(job))
    await asyncio.wait_for(site.decode.first_write.wait(), 5)
    await site.gate.reached()
    if by == "call":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        ticket_id = job.ticket_id if by == "ticket" else None
        await site.worker.cancel(CancelJob(job.request.request_id, ticket_id, "the client left"))
        with pytest.raises(Cancelled):
            await call
    arrival = site.decode.arrivals[job.ticket_id]
    await asyncio.wait_for(arrival.ended.wait(), 1)
    assert arrival.abort_reason is not None
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 7, "the step that had begun was the last"
    assert site.value("baton_generated_tokens_total") == 0
    assert site.value("baton_sequences_finished_total", reason="cancelled") == 1
    assert site.num_ended("aborted") == 1
    assert len(arrival.blocks) == 1


async def test_a_cancel_before_the_first_step_never_offers(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=1, token_budget=1)
    site.gate.hold(after=1)
    first = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(40), request_id="first")))
    await site.gate.reached()
    waiting = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(20, 1), request_id="second")))
    await site.gate.step()
    assert site.value("baton_num_waiting") == 1
    waiting.cancel()
    await site.gate.step()
    assert site.value("baton_num_waiting") == 0
    assert not first.done()
    site.gate.release()
    await first
    await site.settle()
    assert len(site.decode.offers) == 1


async def test_a_cancel_that_overtakes_its_prefill_is_kept_for_it(make_site: MakeSite) -> None:
    site = await make_site()
    job = site.job(prompt_ids(20))
    await site.worker.cancel(CancelJob(job.request.request_id, job.ticket_id))
    with pytest.raises(Cancelled):
        await site.worker.prefill(job)
    await site.worker.cancel(CancelJob(RequestId("nobody")))
    await site.settle()


async def test_a_late_cancel_of_another_attempt_leaves_this_one_alone(make_site: MakeSite) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(100))
    site.gate.hold(after=1)
    call = asyncio.create_task(site.worker.prefill(job))
    await site.gate.reached()
    await site.worker.cancel(CancelJob(job.request.request_id, new_ticket_id()))
    await site.gate.step()
    assert site.value("baton_num_running") == 1
    site.gate.release()
    assert len((await call).deltas) == 1


async def test_a_second_call_with_the_same_ticket_is_refused_and_the_first_goes_on(
    make_site: MakeSite,
) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(100))
    site.gate.hold(after=1)
    first = asyncio.create_task(site.worker.prefill(job))
    await site.gate.reached()
    second = asyncio.create_task(site.worker.prefill(job))
    await site.gate.step()
    with pytest.raises(InvalidRequest):
        await second
    assert not first.done()
    site.gate.release()
    assert len((await first).deltas) == 1
    await site.settle()
    with pytest.raises(InvalidRequest):
        await site.worker.prefill(job)
    assert len(site.decode.offers) == 1


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
    assert site.gate.num_steps == (2 if is_computing else 1), "the step that had begun was the last"
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
    with pytest.raises(InvalidRequest):
        site.worker.generate(job)


async def test_gauges_fall_to_zero_after_aborts_without_new_traffic(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=2, token_budget=4)
    site.gate.hold()
    calls = [
        asyncio.create_task(site.worker.prefill(site.job(prompt_ids(200, seed), request_id=f"r{seed}")))
        for seed in range(6)
    ]
    await site.gate.reached()
    await site.gate.step()  # all others have come meanwhile
    assert site.value("baton_num_running") == 1
    assert site.value("baton_kv_utilization") > 0
    assert site.value("baton_num_waiting") == 5
    assert site.value("baton_num_waiting_tokens") == 5 * 200
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    site.gate.release()
    await site.settle()
    await site.until(lambda: site.value("baton_kv_utilization") == 0)
    for name in (
        "baton_num_running",
        "baton_num_waiting",
        "baton_num_waiting_tokens",
        "baton_kv_leak_difference",
    ):
        assert site.value(name) == 0, name
    exposition = (await site.worker.metrics()).decode()
    families = list(text_string_to_metric_families(exposition))
    assert all(family.documentation for family in families)
    assert not any("r1" in sample.labels.values() for family in families for sample in family.samples)
    result = await site.worker.prefill(site.job(prompt_ids(200, 9)))
    assert len(result.deltas) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_cancels_and_refusals_leaks_nothing_and_the_others_are_right(
    make_site: MakeSite, seed: int
) -> None:
    random = Random(seed)
    site = await make_site(num_kv_blocks=24, max_num_seqs=4, token_budget=random.choice((8, 24, 64)))
    fates = [random.choice(("keep", "keep", "drop", "cancel", "refuse", "corrupt")) for _ in range(40)]
    refused = {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "refuse"}
    corrupt = {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "corrupt"}
    site.decode.refusal, site.decode.refused = ReservationRefused("no room"), refused
    site.decode.commit_error, site.decode.corrupt = TransferCorrupt("damaged"), corrupt
    kept: dict[RequestId, tuple[PrefillJob, PrefillResult]] = {}

    async def one(index: int) -> None:
        ids = prompt_ids(random.randint(1, 150), index)
        job = site.job(ids, request_id=f"r{index}", ignore_eos=True)
        call = asyncio.create_task(site.worker.prefill(job))
        await asyncio.sleep(random.random() * 0.2)
        if fates[index] == "drop":
            call.cancel()
        elif fates[index] == "cancel":
            await site.worker.cancel(CancelJob(job.request.request_id, random.choice((None, job.ticket_id))))
        try:
            kept[job.request.request_id] = (job, await call)
        except (ServingError, asyncio.CancelledError):
            return

    async with asyncio.timeout(30):
        await asyncio.gather(*(one(index) for index in range(40)))
    await site.settle()
    # whoever was dropped or cancelled may have been answered before
    assert kept.keys() >= {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "keep"}
    assert kept.keys() >= corrupt, "the first token does not wait for the transfer"
    assert not kept.keys() & refused
    for job, result in kept.values():
        ids = job.request.prompt_token_ids
        assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)


async def test_watching_shows_the_cached_blocks_and_the_load(make_site: MakeSite) -> None:
    site = await make_site(status_period_s=0.05)
    await site.worker.prefill(site.job(prompt_ids(40)))
    await site.settle()
    events = site.worker.watch()
    snapshot = (await anext(events)).snapshot
    assert snapshot is not None
    hashes = set(snapshot.hashes)
    assert len(hashes) == 2
    await site.worker.prefill(site.job(prompt_ids(40, seed=1)))
    async with asyncio.timeout(5):
        async for event in events:
            hashes.update(change.block_hash for change in event.events if change.block_hash is not None)
            if event.status is not None and len(hashes) == 4:
                assert event.digest is not None
                assert event.digest[0] == 4
                assert event.status.prefill_tokens_per_s > 0
                break
    await events.aclose()
    assert site.worker.announcement().layout == site.runner.layout


async def test_health_ends_with_the_step_thread_or_with_progress(make_site: MakeSite) -> None:
    clock = FakeClock()
    site = await make_site(clock=clock, stall_s=5.0)
    assert site.worker.is_healthy()
    clock.advance(100.0)
    await site.until(site.worker.is_healthy)  # idle is healthy

    site.decode.door.clear()
    site.gate.hold()
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(20))))
    await site.gate.reached()
    clock.advance(4.9)
    assert site.worker.is_healthy()
    clock.advance(0.2)
    assert not site.worker.is_healthy(), "a step that does not end"

    site.gate.release()
    await site.until(site.worker.is_healthy)
    clock.advance(5.1)
    for _ in range(3):  # rounds of the step thread, each with its tick
        await site.worker.check()
    assert not site.worker.is_healthy(), "work without progress"

    site.decode.door.set()
    await call
    await site.settle()
    await site.until(site.worker.is_healthy)
    await site.worker.stop()
    assert not site.worker.is_healthy()
