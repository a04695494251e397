"""Workers die, fall silent or fail under a request: the tokens are those of the undisturbed run."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from core.errors import (
    Cancelled,
    NoWorkerAvailable,
    ServingError,
    StepFailed,
    WorkerDraining,
    WorkerLost,
)
from core.jobs import PrefillJob
from tests.doubles import settle
from tests.unit.router.pipeline_fleet import REMOTE
from tests.unit.router.pipeline_fleet import decode_worker as _d
from tests.unit.router.pipeline_fleet import prefill_worker as _p
from tests.unit.router.scripted import Fleet, answer, new_request


async def test_prefill_dies_mid_prefill_and_another_one_reads_the_prompt() -> None:
    hold = asyncio.Event()
    first, second, decode = _p("p1", hold=hold), _p("p2"), _d()
    async with Fleet(first, decode, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request())
        await settle()
        assert first.num_open_calls == 1
        fleet.join(second)
        await fleet.pass_by(1.0)
        first.die()
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert [job.ticket_id for job in decode.cancels] == [first.prefills[0].ticket_id]
    assert second.prefills[0].ticket_id != first.prefills[0].ticket_id


async def test_the_only_prefill_dies_and_decode_reads_the_prompt() -> None:
    first, decode = _p("p1", hold=asyncio.Event()), _d()
    async with Fleet(first, decode, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request())
        await settle()
        first.die()
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert decode.generates[0].ticket_id is None


async def test_decode_dies_mid_stream_and_another_goes_on_with_the_same_tokens() -> None:
    first, second = _d("d1", pause_at=3), _d("d2")
    async with Fleet(_p(), first, **REMOTE) as fleet:
        request = new_request(8)
        task, reader = fleet.begin(request)
        await settle()
        assert len(reader.tokens[0]) == 3
        fleet.join(second)
        await fleet.pass_by(1.0)
        first.die()
        await task
    assert reader.tokens[0] == answer(request, 0)
    # the tokens that are out are facts: they were read like a prompt, not sampled again
    prefill_jobs = [job for worker in fleet.workers for job in worker.prefills]
    assert prefill_jobs[-1].samples[0].emitted == tuple(answer(request, 0)[:3])
    assert prefill_jobs[-1].attempt == 2


async def test_decode_dies_before_its_first_token_and_prefills_token_is_a_fact() -> None:
    first, second = _d("d1", pause_at=1), _d("d2")
    async with Fleet(_p(), first, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request())
        await settle()
        fleet.join(second)
        await fleet.pass_by(1.0)
        first.die()
        await task
    assert reader.tokens[0] == answer(new_request(), 0)


async def test_a_single_decode_that_comes_back_before_the_deadline_goes_on() -> None:
    first = _d("d", pause_at=3)
    async with Fleet(_p(), first, **REMOTE) as fleet:
        request = new_request(8)
        task, reader = fleet.begin(request, timeout_s=60.0)
        await settle()
        first.die()
        await fleet.pass_by(54.0)
        assert not task.done()
        fleet.join(_d("d", epoch=2))
        await fleet.pass_by(0.9)
        await task
    assert reader.tokens[0] == answer(request, 0)


async def test_a_single_decode_that_does_not_come_back_ends_the_request_before_its_deadline() -> None:
    first = _d("d", pause_at=3)
    async with Fleet(_p(), first, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request(8), timeout_s=60.0)
        await settle()
        first.die()
        fleet.listed = [worker for worker in fleet.listed if worker is not first]
        await fleet.pass_by(54.0)
        assert not task.done()
        await fleet.pass_by(1.1)
        with pytest.raises(NoWorkerAvailable):
            await task
    assert reader.tokens[0] == answer(new_request(8), 0)[:3]


async def test_samples_that_lose_their_worker_go_on_separately_with_their_own_tokens() -> None:
    first, second = _d("d1", pause_at=3), _d("d2")
    async with Fleet(_p(), first, **REMOTE) as fleet:
        request = new_request(8, num_samples=3)
        task, reader = fleet.begin(request)
        await settle()
        fleet.join(second)
        await fleet.pass_by(1.0)
        first.die()
        await task
    for index in range(3):
        assert reader.tokens[index] == answer(request, index)
    attempts = [job.attempt for job in second.generates]
    assert len(attempts) == 3
    assert len(set(attempts)) == 3
    assert all(len(job.samples) == 1 for job in second.generates)


async def test_eight_samples_survive_as_many_deaths_as_one() -> None:
    workers = [_d(f"d{index}", pause_at=3 + index) for index in range(4)]
    async with Fleet(workers[0]) as fleet:
        request = new_request(12, num_samples=8)
        task, reader = fleet.begin(request)
        await settle()
        for worker, successor in itertools.pairwise(workers):
            fleet.join(successor)
            await fleet.pass_by(1.0)
            worker.die()
            await fleet.pass_by(2.0)
        workers[-1].resume.set()
        await task
    for index in range(8):
        assert reader.tokens[index] == answer(request, index)


async def test_a_step_that_fails_for_a_request_on_two_workers_ends_it() -> None:
    prefill, decode = _p(on_prefill=lambda job: StepFailed("boom")), _d()
    decode.on_generate = lambda job: StepFailed("boom")
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        task, _ = fleet.begin(new_request())
        await fleet.pass_by(2.0)
        with pytest.raises(StepFailed):
            await task
    assert len(prefill.prefills) + len(decode.generates) <= 3


async def test_a_decode_worker_that_is_lost_while_prefill_reads_is_not_waited_for() -> None:
    prefill, lost, other = _p(hold=asyncio.Event()), _d("d1"), _d("d2")
    async with Fleet(prefill, lost, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request(), timeout_s=30.0)
        await settle()
        fleet.join(other)
        lost.is_silent, lost.pause_at = True, 1  # its streams would stay silent too
        await fleet.pass_by(10.0)
        assert prefill.hold is not None
        prefill.hold.set()
        await fleet.pass_by(2.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert not lost.generates


async def test_a_lost_prefill_ends_its_own_ticket_even_while_a_sibling_runs_on_the_same_decode() -> None:
    prefill, first, second = _p("p1"), _d("d1", pause_at=3), _d("d2", pause_at=5)
    async with Fleet(prefill, first, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request(8, num_samples=2))
        await settle()
        fleet.join(second)
        await fleet.pass_by(1.0)
        prefills = len(prefill.prefills)

        def lose_second(job: PrefillJob) -> ServingError | None:
            is_first_try = job.samples[0].sample_index == 1 and len(prefill.prefills) <= prefills + 2
            return WorkerLost("gone", worker_id="p1") if is_first_try else None

        prefill.on_prefill = lose_second
        first.die()
        await fleet.pass_by(3.0)
        tickets = [job.ticket_id for job in prefill.prefills if job.samples[0].sample_index == 1]
        assert [job.ticket_id for job in second.cancels] == tickets[:1]
        second.resume.set()
        await task
    for index in range(2):
        assert reader.tokens[index] == answer(new_request(8), index)


async def test_tokens_that_a_worker_repeats_are_dropped_and_skipped_ones_are_fetched_again() -> None:
    async with Fleet(_d()) as fleet:
        decode = fleet.workers[0]
        request = new_request(5)
        whole = decode._tokens

        async def stuttering(job):  # type: ignore[no-untyped-def]
            events = [event async for event in whole(job)]
            for index in (0, 0, 1, 0, 1, 3, 4) if job.attempt == 1 else range(len(events)):
                yield events[index]

        decode._tokens = stuttering  # type: ignore[method-assign]
        task, reader = fleet.begin(request)
        await fleet.pass_by(2.0)
        await task
    assert reader.tokens[0] == answer(request, 0)
    assert decode.generates[1].samples[0].emitted == tuple(answer(request, 0)[:2])


@pytest.mark.parametrize("error", [WorkerDraining("draining"), StepFailed("boom"), Cancelled("given up")])
async def test_a_stream_that_its_worker_gives_up_goes_on(error: ServingError) -> None:
    decode = _d(break_at={2: error})
    async with Fleet(_p(), decode, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(3.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)


async def test_a_silent_worker_is_left_when_another_can_take_over() -> None:
    frozen = _d("d1", pause_at=3)
    async with Fleet(_p(), frozen, suspect_after_s=3.0, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request(8))
        await settle()
        other = _d("d2")
        fleet.join(other)
        frozen.is_silent = True
        await fleet.pass_by(4.0)
        await task
    assert reader.tokens[0] == answer(new_request(8), 0)
    assert other.generates
    # it may be alive after all, so it is told that nobody listens
    assert frozen.num_open_calls == 0


async def test_without_any_worker_a_new_request_waits_a_bounded_time() -> None:
    async with Fleet(worker_wait_s=10.0) as fleet:
        task, _ = fleet.begin(new_request(), timeout_s=100.0)
        await fleet.pass_by(9.0)
        assert not task.done()
        await fleet.pass_by(1.5)
        with pytest.raises(NoWorkerAvailable) as caught:
            await task
    assert caught.value.details["retry_after_s"]


async def test_a_worker_that_comes_is_used_at_once() -> None:
    async with Fleet() as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(3.0)
        fleet.join(_d())
        await fleet.pass_by(0.6)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
