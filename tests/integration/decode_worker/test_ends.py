"""How streams end before their time: cancelled, left, overdue, broken, drained. Blocks are free at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.block_hash import NUM_PARTS
from core.errors import Cancelled, DeadlineExceeded, StepFailed, WorkerDraining, WorkerLost
from core.ids import new_ticket_id
from core.jobs import CancelJob, GenerateJob, SnapshotJob
from core.request import FinishReason
from engine.running_step import RunningStep
from engine.step import StepPlan
from tests.doubles import FakeClock, settle
from tests.integration.decode_worker.conftest import Answer, MakeSite, Site, prompt_ids
from tests.integration.told_loads import watched
from tests.oracle import oracle_greedy

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def long_job(site: Site, name: str = "r", num_samples: int = 1, **changes: Any) -> GenerateJob:
    request = site.request(prompt_ids(30), name, num_samples, temperature=0.8, **LONG)
    return site.job(request, **changes)


async def read(site: Site, job: GenerateJob, num_events: int) -> Answer:
    """Read so many events and leave."""
    answer = Answer()
    events = site.worker.generate(job)
    async for event in events:
        answer.add(event)
        num_events -= 1
        if not num_events:
            break
    await events.aclose()
    return answer


async def start_and_hold(site: Site, *jobs: GenerateJob) -> list[asyncio.Task[dict[int, Answer]]]:
    """Streams that have all come to the step thread, which stands before its third step."""
    site.gate.hold()
    streams = [asyncio.create_task(site.answers(job)) for job in jobs]
    await site.gate.reached()
    await site.gate.step(2)
    return streams


@pytest.mark.parametrize("num_samples", [1, 4])
async def test_a_cancel_ends_the_stream_and_frees_its_blocks(make_site: MakeSite, num_samples: int) -> None:
    site = await make_site(num_kv_blocks=128)
    job = long_job(site, num_samples=num_samples)
    (stream,) = await start_and_hold(site, job)
    cancelling = asyncio.create_task(site.worker.cancel(CancelJob(job.request.request_id)))
    await settle()
    site.gate.release()
    with pytest.raises(Cancelled):
        await stream
    await cancelling
    await site.settle()
    assert site.gate.num_steps == 3, "the step that had begun was the last"
    labels = {"reason": "cancelled"}
    assert site.value("baton_sequences_finished_total", **labels) == num_samples


async def test_a_cancel_of_one_ticket_leaves_the_other_jobs_of_the_request_alone(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    request = site.request(prompt_ids(30), max_tokens=50, ignore_eos=True)
    whole = (await site.answer(site.job(request))).token_ids
    tickets = [new_ticket_id(), new_ticket_id()]
    for ticket in tickets:
        await site.worker.abort(ticket, "nothing is handed over", 60.0)
    jobs = [site.job(request, attempt=index + 1, ticket_id=ticket) for index, ticket in enumerate(tickets)]
    stopped, kept = await start_and_hold(site, *jobs)
    assert site.value("baton_num_running") == 2
    cancelling = asyncio.create_task(site.worker.cancel(CancelJob(request.request_id, tickets[0])))
    await settle()
    site.gate.release()
    with pytest.raises(Cancelled):
        await stopped
    assert (await kept)[0].token_ids == whole
    await cancelling
    await site.settle()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_cancel_of_one_sample_ends_it_and_its_siblings_go_on(
    make_site: MakeSite, is_first: bool
) -> None:
    site = await make_site(num_kv_blocks=128)
    request = site.request(prompt_ids(30), num_samples=3, temperature=0.8, max_tokens=100, ignore_eos=True)
    whole = await site.answers(site.job(request))
    before = site.value("baton_generated_tokens_total")
    victim = 0 if is_first else 2
    (stream,) = await start_and_hold(site, site.job(request, attempt=1))
    cancelling = asyncio.create_task(site.worker.cancel(CancelJob(request.request_id, sample_index=victim)))
    await settle()
    site.gate.release()
    found = await stream
    await cancelling
    assert found[victim].finish_reason is FinishReason.CANCELLED
    assert 0 < len(found[victim].token_ids) < 100
    assert found[victim].token_ids == whole[victim].token_ids[: len(found[victim].token_ids)]
    for index in {0, 1, 2} - {victim}:
        assert found[index].token_ids == whole[index].token_ids
    num_computed = site.value("baton_generated_tokens_total") - before
    assert num_computed == sum(len(answer.token_ids) for answer in found.values()) < 300
    await site.settle()


async def test_a_job_whose_samples_are_all_cancelled_one_by_one_has_ended(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    job = long_job(site, num_samples=2)
    (stream,) = await start_and_hold(site, job)
    request_id = job.request.request_id
    for index in range(2):
        cancelling = asyncio.create_task(site.worker.cancel(CancelJob(request_id, sample_index=index)))
        await settle()  # the command is in the queue before the step goes on
        await site.gate.step() if index == 0 else site.gate.release()
        await cancelling
    found = await stream
    assert all(answer.finish_reason is FinishReason.CANCELLED for answer in found.values())
    assert len(found[0].token_ids) < len(found[1].token_ids) < 10
    await site.settle()


async def test_a_stream_nobody_listens_to_is_cancelled_and_the_counter_stops(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128, detach_grace_s=0.05)
    site.gate.hold()
    reading = [asyncio.create_task(read(site, long_job(site, f"r{index}"), 3)) for index in range(3)]
    await site.gate.reached()
    await site.gate.step(5)
    await asyncio.gather(*reading)
    await asyncio.sleep(0.1)  # the grace, which began before this, is over before this
    await settle()
    site.gate.release()
    await site.settle()
    before = site.value("baton_generated_tokens_total")
    await asyncio.sleep(0.1)
    assert site.value("baton_generated_tokens_total") == before
    assert site.gate.num_steps == 6, "the step that had begun was the last"


async def test_a_waiting_request_that_is_left_is_forgotten(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=1, detach_grace_s=0.0)
    request = site.request(prompt_ids(9), "a", max_tokens=50, ignore_eos=True)
    first, waiting = await start_and_hold(site, site.job(request), long_job(site, "b"))
    assert (site.value("baton_num_running"), site.value("baton_num_waiting")) == (1, 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0.01)  # the grace of no time is a turn of the loop's timers
    await site.gate.step()
    assert (site.value("baton_num_running"), site.value("baton_num_waiting")) == (1, 0)
    site.gate.release()
    await first
    await site.settle()
    assert site.value("baton_generated_tokens_total") == 50


async def test_a_listener_that_comes_back_gets_each_token_once(make_site: MakeSite) -> None:
    site = await make_site(detach_grace_s=5.0)
    request = site.request(prompt_ids(30), temperature=0.8, max_tokens=100, ignore_eos=True)
    whole = (await site.answer(site.job(request, attempt=1))).token_ids
    site.gate.hold(after=12)
    start = await read(site, site.job(request), 10)
    resumed = asyncio.create_task(site.answer(site.job(request, emitted=tuple(start.token_ids))))
    await settle()
    site.gate.release()
    rest = await resumed
    assert [*start.token_ids, *rest.token_ids] == whole
    again = await site.answer(site.job(request))
    assert again.token_ids == whole
    assert site.value("baton_generated_tokens_total") == 200, "a repeated call started a second sequence"


async def test_two_listeners_of_one_job_get_the_same(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(30), temperature=0.8, max_tokens=50, ignore_eos=True)
    one, other = await asyncio.gather(site.answer(site.job(request)), site.answer(site.job(request)))
    assert one.token_ids == other.token_ids
    assert site.value("baton_generated_tokens_total") == 50


@pytest.mark.parametrize("max_num_seqs", [1, 4])
async def test_a_deadline_ends_running_and_waiting_streams_with_a_typed_error(
    make_site: MakeSite, max_num_seqs: int
) -> None:
    clock = FakeClock()
    site = await make_site(max_num_seqs=max_num_seqs, num_kv_blocks=128, clock=clock)
    jobs = [long_job(site, f"r{index}", time_left_s=30.0) for index in range(3)]
    streams = await start_and_hold(site, *jobs)
    num_running = min(3, max_num_seqs)
    assert (site.value("baton_num_running"), site.value("baton_num_waiting")) == (
        num_running,
        3 - num_running,
    )
    clock.advance(30.0)
    site.gate.release()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert site.gate.num_steps == 3, "the step that had begun was the last"
    await site.settle()


async def test_a_broken_step_costs_only_the_request_that_breaks_it(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await make_site()
    start = site.runner.start

    def break_at(plan: StepPlan) -> RunningStep:
        for item in plan.scheduled:
            if item.sequence.request.request_id == "poison" and item.sequence.num_output_tokens == 5:
                raise RuntimeError("a kernel fault")
        return start(plan)

    monkeypatch.setattr(site.runner, "start", break_at)
    prompts = {"a": prompt_ids(30), "poison": prompt_ids(31, seed=1), "b": prompt_ids(32, seed=2)}
    jobs = [site.job(site.request(ids, name, max_tokens=20)) for name, ids in prompts.items()]
    a, poison, b = await asyncio.gather(*(site.answer(job) for job in jobs), return_exceptions=True)
    assert isinstance(poison, StepFailed)
    for name, answer in (("a", a), ("b", b)):
        assert isinstance(answer, Answer)
        assert answer.token_ids == oracle_greedy(site.folder, prompts[name], 20, eos=(2,))
    monkeypatch.undo()
    after = await site.answer(site.job(site.request(prompts["poison"], "poison2", max_tokens=20)))
    assert after.token_ids == oracle_greedy(site.folder, prompts["poison"], 20, eos=(2,))
    await site.settle()
    assert site.worker.is_healthy()


async def test_a_drain_finishes_what_runs(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(30), max_tokens=60, ignore_eos=True)
    (running,) = await start_and_hold(site, site.job(request))
    draining = asyncio.create_task(site.worker.drain(30.0))
    await site.gate.step()
    assert not draining.done()
    site.gate.release()
    await draining
    assert len((await running)[0].token_ids) == 60
    status = [event.status async for event in first_events(site, 1) if event.status is not None]
    assert status[-1].is_draining


async def first_events(site: Site, num: int) -> Any:
    async for event in site.worker.watch():
        yield event
        num -= 1
        if not num:
            return


async def test_what_a_drain_cannot_finish_in_time_ends_so_that_it_is_resumed_elsewhere(
    make_site: MakeSite,
) -> None:
    site = await make_site(num_kv_blocks=128)
    (running,) = await start_and_hold(site, long_job(site))
    draining = asyncio.create_task(site.worker.drain(0.05))
    await site.gate.step()
    await asyncio.sleep(0.1)  # its time, which began before this, is up before this
    await settle()
    site.gate.release()
    await draining
    with pytest.raises(WorkerDraining):
        await running
    await site.settle()
    assert site.gate.num_steps == 4, "the step that had begun was the last"


async def test_a_stopped_worker_ends_its_streams_and_takes_no_more(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    (running,) = await start_and_hold(site, long_job(site))
    stopping = asyncio.create_task(site.worker.stop())
    await site.gate.step()
    site.gate.release()
    await stopping
    with pytest.raises(WorkerDraining):
        await running
    assert not site.worker.is_healthy()
    with pytest.raises(WorkerLost):
        await site.answer(long_job(site, "later"))
    await site.worker.stop()


async def test_watch_tells_the_blocks_that_exist_and_the_load(make_site: MakeSite) -> None:
    site = await make_site(status_period_s=0.05)
    await site.answer(site.job(site.request(prompt_ids(40))))
    names: set[bytes] = set()
    async with asyncio.timeout(5):
        async for event in site.worker.watch():
            if not names:
                names |= set((await site.worker.snapshot(SnapshotJob(0, NUM_PARTS))).hashes)
            if event.status is not None and event.status.num_cached_blocks:
                assert event.digest is not None
                assert event.digest[0] == len(names) == event.status.num_cached_blocks == 3
                assert (event.status.num_running, event.status.num_held_blocks) == (0, 0)
                assert event.status.step_s > 0
                assert event.status.prefill_tokens_per_s > 0
                break


async def test_a_sequence_that_has_ended_is_out_of_the_load_long_before_the_next_period(
    make_site: MakeSite,
) -> None:
    site = await make_site(status_period_s=600.0)
    async with watched(site.worker) as told:
        for seed in (1, 2):
            await site.until(lambda: bool(told) and told[-1] == (0, 0))
            told.clear()
            await site.answer(site.job(site.request(prompt_ids(40, seed=seed), request_id=f"r{seed}")))
            assert any(sum(counts) for counts in told), "it was in the load"
        await site.until(lambda: told[-1] == (0, 0))


async def test_the_announcement_says_what_is_served(make_site: MakeSite) -> None:
    site = await make_site(model="toy", home_pool="decode")
    announcement = site.worker.announcement()
    assert (announcement.ref, announcement.model) == (site.worker.ref, "toy")
    assert announcement.layout == site.runner.layout
    assert announcement.max_context == 512
