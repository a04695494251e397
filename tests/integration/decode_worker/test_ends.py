"""How streams end before their time: cancelled, left, overdue, broken, drained. Blocks are free at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.errors import Cancelled, DeadlineExceeded, StepFailed, WorkerDraining, WorkerLost
from core.ids import new_ticket_id
from core.jobs import CancelJob, GenerateJob
from core.request import FinishReason
from engine.step import StepOutput, StepPlan
from tests.integration.decode_worker.conftest import Answer, MakeSite, Site, prompt_ids
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


@pytest.mark.parametrize("num_samples", [1, 4])
async def test_a_cancel_ends_the_stream_and_frees_its_blocks(make_site: MakeSite, num_samples: int) -> None:
    site = await make_site(num_kv_blocks=128)
    job = long_job(site, num_samples=num_samples)
    events = site.worker.generate(job)
    await anext(events)
    await site.worker.cancel(CancelJob(job.request.request_id))
    with pytest.raises(Cancelled):
        async for _ in events:
            pass
    await site.settle()
    labels = {"reason": "cancelled"}
    assert site.value("baton_sequences_finished_total", **labels) == num_samples


async def test_a_cancel_of_one_ticket_leaves_the_other_jobs_of_the_request_alone(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128, ticket_wait_s=0.01)
    request = site.request(prompt_ids(30), max_tokens=300, ignore_eos=True)  # not done before the cancel
    whole = (await site.answer(site.job(request))).token_ids
    tickets = [new_ticket_id(), new_ticket_id()]
    jobs = [site.job(request, attempt=index + 1, ticket_id=ticket) for index, ticket in enumerate(tickets)]
    streams = [site.worker.generate(job) for job in jobs]
    starts = [await anext(stream) for stream in streams]
    await site.worker.cancel(CancelJob(request.request_id, tickets[0]))
    with pytest.raises(Cancelled):
        async for _ in streams[0]:
            pass
    rest = [token async for event in streams[1] for token in event.delta.token_ids]
    assert [*starts[1].delta.token_ids, *rest] == whole
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
    found: dict[int, Answer] = {index: Answer() for index in range(3)}
    async for event in site.worker.generate(site.job(request, attempt=1)):
        found[event.delta.sample_index].add(event)
        if event.delta.sample_index == victim and len(found[victim].token_ids) == 3:
            await site.worker.cancel(CancelJob(request.request_id, sample_index=victim))
    assert found[victim].finish_reason is FinishReason.CANCELLED
    assert found[victim].token_ids == whole[victim].token_ids[: len(found[victim].token_ids)]
    for index in {0, 1, 2} - {victim}:
        assert found[index].token_ids == whole[index].token_ids
    num_computed = site.value("baton_generated_tokens_total") - before
    assert num_computed == sum(len(answer.token_ids) for answer in found.values()) < 300
    await site.settle()


async def test_a_job_whose_samples_are_all_cancelled_one_by_one_has_ended(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    job = long_job(site, num_samples=2)
    async with asyncio.timeout(5):
        async for event in site.worker.generate(job):
            if event.delta.token_ids:
                await site.worker.cancel(
                    CancelJob(job.request.request_id, sample_index=event.delta.sample_index)
                )
    await site.settle()


async def test_a_stream_nobody_listens_to_is_cancelled_and_the_counter_stops(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128, detach_grace_s=0.05)
    await asyncio.gather(*(read(site, long_job(site, f"r{index}"), 3) for index in range(3)))
    await site.settle()
    before = site.value("baton_generated_tokens_total")
    await asyncio.sleep(0.1)
    assert site.value("baton_generated_tokens_total") == before < 3 * 400


async def test_a_waiting_request_that_is_left_is_forgotten(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=1, detach_grace_s=0.0)
    first = asyncio.create_task(site.answer(site.job(site.request(prompt_ids(9), "a", max_tokens=100))))
    await site.until(lambda: site.value("baton_num_running") == 1)
    waiting = asyncio.create_task(site.answer(long_job(site, "b")))
    await site.until(lambda: site.value("baton_num_waiting") == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await site.until(lambda: site.value("baton_num_waiting") == 0)
    await first
    await site.settle()


async def test_a_listener_that_comes_back_gets_each_token_once(make_site: MakeSite) -> None:
    site = await make_site(detach_grace_s=5.0)
    request = site.request(prompt_ids(30), temperature=0.8, max_tokens=100, ignore_eos=True)
    whole = (await site.answer(site.job(request, attempt=1))).token_ids
    start = await read(site, site.job(request), 10)
    rest = await site.answer(site.job(request, emitted=tuple(start.token_ids)))
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
    site = await make_site(max_num_seqs=max_num_seqs, num_kv_blocks=128)
    jobs = [long_job(site, f"r{index}", time_left_s=0.3) for index in range(3)]
    started = asyncio.get_running_loop().time()
    results = await asyncio.gather(*(site.answer(job) for job in jobs), return_exceptions=True)
    assert asyncio.get_running_loop().time() - started < 1.5
    assert all(isinstance(result, DeadlineExceeded | Answer) for result in results)
    assert any(isinstance(result, DeadlineExceeded) for result in results)
    await site.settle()


async def test_a_broken_step_costs_only_the_request_that_breaks_it(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await make_site()
    run = site.runner.run

    def break_at(plan: StepPlan) -> StepOutput:
        for item in plan.scheduled:
            if item.sequence.request.request_id == "poison" and item.sequence.num_output_tokens == 5:
                raise RuntimeError("a kernel fault")
        return run(plan)

    monkeypatch.setattr(site.runner, "run", break_at)
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
    running = asyncio.create_task(site.answer(site.job(request)))
    await site.until(lambda: site.value("baton_num_running") == 1)
    await site.worker.drain(10.0)
    assert len((await running).token_ids) == 60
    status = [event.status async for event in first_events(site, 2) if event.status is not None]
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
    running = asyncio.create_task(site.answer(long_job(site)))
    await site.until(lambda: site.value("baton_num_running") == 1)
    await site.worker.drain(0.05)
    with pytest.raises(WorkerDraining):
        await running
    await site.settle()


async def test_a_stopped_worker_ends_its_streams_and_takes_no_more(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    running = asyncio.create_task(site.answer(long_job(site)))
    await site.until(lambda: site.value("baton_num_running") == 1)
    await site.worker.stop()
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
            if event.snapshot is not None:
                names |= set(event.snapshot.hashes)
            if event.status is not None and event.status.num_cached_blocks:
                assert event.digest is not None
                assert event.digest[0] == len(names) == event.status.num_cached_blocks == 3
                assert (event.status.num_running, event.status.num_held_blocks) == (0, 0)
                assert event.status.step_s > 0
                assert event.status.prefill_tokens_per_s > 0
                break


async def test_the_announcement_says_what_is_served(make_site: MakeSite) -> None:
    site = await make_site(model="toy", home_pool="decode")
    announcement = site.worker.announcement()
    assert (announcement.ref, announcement.model) == (site.worker.ref, "toy")
    assert announcement.layout == site.runner.layout
    assert announcement.max_context == 512
