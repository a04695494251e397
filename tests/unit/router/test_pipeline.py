"""A request's way through the workers: whatever fails, the tokens are those of the undisturbed run."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from core.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkerAvailable,
    Overloaded,
    ReservationRefused,
    ServingError,
    StepFailed,
    TransferCorrupt,
    WorkerDraining,
    WorkerLost,
)
from core.ids import Role
from core.jobs import PrefillJob
from core.request import FinishReason
from router.config import PlanSetting
from router.decision import Plan
from tests.doubles import CreepingTime, settle
from tests.unit.router.scripted import Collector, Fleet, ScriptedWorker, answer, new_request

REMOTE = {"plan": PlanSetting.REMOTE}


def _p(name: str = "p", **script: object) -> ScriptedWorker:
    return ScriptedWorker(Role.PREFILL, name, **script)  # type: ignore[arg-type]


def _d(name: str = "d", **script: object) -> ScriptedWorker:
    return ScriptedWorker(Role.DECODE, name, **script)  # type: ignore[arg-type]


# ---------------------------------------------------------------- undisturbed


async def test_prefill_gives_the_first_token_and_decode_the_rest_under_one_ticket() -> None:
    prefill, decode = _p(num_cached_tokens=4), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        request = new_request()
        reader = await fleet.serve(request)
    assert reader.tokens[0] == answer(request, 0)
    assert reader.reasons == {0: FinishReason.LENGTH}
    (prefill_job,), (generate_job,) = prefill.prefills, decode.generates
    assert prefill_job.decode == decode.ref
    assert prefill_job.ticket_id == generate_job.ticket_id
    assert generate_job.samples[0].emitted == tuple(answer(request, 0)[:1])
    assert reader.events[0].delta.num_cached_tokens == 4
    assert reader.decisions[0].plan is Plan.REMOTE
    assert not prefill.cancels
    assert not decode.cancels


async def test_a_local_plan_sends_one_job_without_a_ticket() -> None:
    prefill, decode = _p(), _d()
    async with Fleet(prefill, decode, plan=PlanSetting.LOCAL) as fleet:
        request = new_request()
        reader = await fleet.serve(request)
    assert reader.tokens[0] == answer(request, 0)
    assert not prefill.prefills
    assert decode.generates[0].ticket_id is None


async def test_without_prefill_workers_decode_reads_the_prompt() -> None:
    decode = _d()
    async with Fleet(decode, **REMOTE) as fleet:
        request = new_request()
        assert (await fleet.serve(request)).tokens[0] == answer(request, 0)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_answer_of_at_most_one_token_makes_no_offer(max_tokens: int) -> None:
    prefill, decode = _p(), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        request = new_request(max_tokens)
        reader = await fleet.serve(request)
    assert reader.tokens[0] == answer(request, 0)
    assert reader.reasons == {0: FinishReason.LENGTH}
    assert prefill.prefills[0].decode is None
    assert not decode.generates


async def test_a_first_token_that_ends_the_answer_aborts_the_ticket_on_both_sides() -> None:
    prefill, decode = _p(), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        first = answer(new_request(), 0)[0]
        reader = await fleet.serve(new_request(stop_token_ids=(first,)))
        await settle()
        assert reader.reasons == {0: FinishReason.STOP}
        assert not decode.generates
        ticket_id = prefill.prefills[0].ticket_id
        assert [job.ticket_id for job in decode.cancels] == [ticket_id]
        assert [job.ticket_id for job in prefill.cancels] == [ticket_id]


async def test_samples_share_one_prefill_one_ticket_and_one_stream() -> None:
    prefill, decode = _p(), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        request = new_request(num_samples=3)
        reader = await fleet.serve(request)
    for index in range(3):
        assert reader.tokens[index] == answer(request, index)
    assert len(prefill.prefills) == len(decode.generates) == 1
    assert [sample.sample_index for sample in decode.generates[0].samples] == [0, 1, 2]


async def test_prompt_logprobs_come_once_with_the_first_event() -> None:
    for plan in (PlanSetting.REMOTE, PlanSetting.LOCAL):
        async with Fleet(_p(), _d(), plan=plan) as fleet:
            request = new_request(prompt_logprobs=1, num_samples=2)
            reader = await fleet.serve(request)
        found = [event.prompt_logprobs for event in reader.events if event.prompt_logprobs]
        assert len(found) == 1
        assert len(found[0]) == request.num_prompt_tokens - 1
        assert reader.events[0].prompt_logprobs


# ---------------------------------------------------------------- refusals


async def test_a_refused_offer_is_placed_again_elsewhere() -> None:
    full, free = _d("full"), _d("free")

    def refuse(job: object) -> ServingError | None:
        is_full = getattr(job, "decode", None) == full.ref
        return ReservationRefused("no room", worker_id="full") if is_full else None

    prefill = _p(on_prefill=refuse)
    async with Fleet(prefill, full, free, **REMOTE) as fleet:
        for _ in range(5):
            request = new_request()
            assert (await fleet.serve(request)).tokens[0] == answer(request, 0)
    assert not full.generates
    assert len(free.generates) == 5
    tickets = [job.ticket_id for job in prefill.prefills]
    assert len(set(tickets)) == len(tickets)


async def test_a_single_decode_that_keeps_refusing_kv_is_given_the_prompt_to_queue() -> None:
    prefill, decode = _p(on_prefill=lambda job: ReservationRefused("no room")), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(5.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert len(prefill.prefills) == 2
    assert decode.generates[0].ticket_id is None


async def test_an_overloaded_decode_is_asked_again_until_it_has_room() -> None:
    refusals = iter([Overloaded("queue is full")] * 6)
    decode = _d(on_generate=lambda job: next(refusals, None))
    async with Fleet(decode) as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(10.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert len(decode.generates) == 7


@pytest.mark.parametrize("num_ticks", range(8))
async def test_a_wait_that_ends_between_two_readings_of_the_clock_is_not_waited_for_again(
    num_ticks: int,
) -> None:
    refusals = iter([Overloaded("queue is full")] * 3)
    decode = _d(on_generate=lambda job: next(refusals, None))
    time = CreepingTime(early_s=(num_ticks + 0.5) * CreepingTime.TICK_S)
    async with Fleet(decode, time=time) as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(2.0)
        assert task.done()
        await task
    assert reader.tokens[0] == answer(new_request(), 0)


async def test_a_request_that_never_finds_room_ends_by_the_last_refusal_before_its_deadline() -> None:
    decode = _d(on_generate=lambda job: Overloaded("queue is full"))
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request(), timeout_s=30.0)
        await fleet.pass_by(28.5)
        assert not task.done()
        await fleet.pass_by(1.4)
        with pytest.raises(Overloaded):
            await task


@pytest.mark.parametrize("refusal", [ReservationRefused("no room"), Overloaded("queue is full")])
async def test_a_refusal_late_in_a_short_deadline_is_not_the_last_word(refusal: ServingError) -> None:
    hold, refusals = asyncio.Event(), iter([refusal])
    prefill = _p(hold=hold, on_prefill=lambda job: next(refusals, None))
    async with Fleet(prefill, _d(), **REMOTE) as fleet:
        task, reader = fleet.begin(new_request(), timeout_s=8.0)
        await fleet.pass_by(4.5)
        hold.set()
        await fleet.pass_by(1.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)


async def test_a_request_that_no_worker_has_room_for_is_told_when_to_come_again() -> None:
    decode = _d(on_generate=lambda job: ReservationRefused("no room", worker_id="d"))
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request(), timeout_s=8.0)
        await fleet.pass_by(8.0)
        with pytest.raises(Overloaded) as caught:
            await task
    assert caught.value.details["retry_after_s"]


async def test_a_corrupted_transfer_is_not_repeated_decode_reads_the_prompt() -> None:
    prefill, decode = _p(on_prefill=lambda job: TransferCorrupt("checksum")), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        reader = await fleet.serve(new_request())
    assert reader.tokens[0] == answer(new_request(), 0)
    assert len(prefill.prefills) == 1
    assert decode.generates[0].ticket_id is None


async def test_a_prompt_too_long_for_the_prefill_worker_is_read_by_decode() -> None:
    prefill, decode = _p(on_prefill=lambda job: ContextTooLong("pool")), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        assert (await fleet.serve(new_request())).tokens[0] == answer(new_request(), 0)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_too_long_for_prefill_whose_answer_is_one_token_is_read_by_decode(
    max_tokens: int,
) -> None:
    prefill, decode = _p(on_prefill=lambda job: ContextTooLong("pool")), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        request = new_request(max_tokens)
        assert (await fleet.serve(request)).tokens[0] == answer(request, 0)
    assert len(decode.generates) == 1


async def test_a_request_too_long_for_one_decode_worker_goes_to_one_with_a_larger_pool() -> None:
    small, large = _d("small", on_generate=lambda job: ContextTooLong("pool")), _d("large", is_dead=True)
    async with Fleet(small, large) as fleet:
        task, reader = fleet.begin(new_request())
        await fleet.pass_by(1.0)
        assert not task.done()
        large.is_dead = False
        await fleet.pass_by(1.0)
        await task
    assert reader.tokens[0] == answer(new_request(), 0)
    assert len(small.generates) == 1


async def test_a_request_too_long_for_every_worker_is_the_clients_mistake() -> None:
    workers = [_d(name, on_generate=lambda job: ContextTooLong("pool", max_context=9)) for name in "ab"]
    async with Fleet(*workers) as fleet:
        with pytest.raises(ContextTooLong):
            await fleet.serve(new_request())
    assert [len(worker.generates) for worker in workers] == [1, 1]


async def test_what_the_client_did_wrong_is_not_tried_again() -> None:
    decode = _d(on_generate=lambda job: InvalidRequest("no", param="prompt"))
    async with Fleet(decode) as fleet:
        with pytest.raises(InvalidRequest):
            await fleet.serve(new_request())
    assert len(decode.generates) == 1


async def test_a_request_that_breaks_every_worker_is_given_up() -> None:
    decode = _d(on_generate=lambda job: StepFailed("boom"))
    async with Fleet(decode, max_failures=3) as fleet:
        task, _ = fleet.begin(new_request())
        await fleet.pass_by(20.0)
        with pytest.raises(StepFailed):
            await task
    assert len(decode.generates) == 4


# ---------------------------------------------------------------- deaths


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


# ---------------------------------------------------------------- ends


async def test_the_deadline_ends_the_request_and_cancels_its_worker() -> None:
    decode = _d(pause_at=2)
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request(), timeout_s=10.0)
        await fleet.pass_by(9.0)
        assert not task.done()
        await fleet.pass_by(1.1)
        with pytest.raises(DeadlineExceeded):
            await task
        await settle()
    assert decode.num_open_calls == 0
    assert [job.request_id for job in decode.cancels] == ["r-0"]


@pytest.mark.parametrize("is_prefilling", [True, False])
async def test_a_client_that_goes_away_cancels_both_legs(is_prefilling: bool) -> None:
    prefill = _p(hold=asyncio.Event() if is_prefilling else None)
    decode = _d(pause_at=1)
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        task, _ = fleet.begin(new_request())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert len(prefill.cancels) == len(decode.cancels) == 1
        assert decode.cancels[0].ticket_id == prefill.prefills[0].ticket_id
        assert prefill.num_open_calls == decode.num_open_calls == 0


async def test_a_reader_that_has_enough_cancels_the_worker() -> None:
    decode = _d()
    async with Fleet(_p(), decode, **REMOTE) as fleet:
        reader = await fleet.serve(new_request(50), Collector({0: 4}))
        await settle()
        assert len(reader.tokens[0]) == 4
        assert len(decode.cancels) == 1
        assert decode.num_open_calls == 0


async def test_a_reader_that_has_enough_of_one_sample_gets_the_others_whole() -> None:
    decode = _d()
    async with Fleet(_p(), decode, **REMOTE) as fleet:
        request = new_request(6, num_samples=2)
        reader = await fleet.serve(request, Collector({0: 1}))
    assert reader.tokens[0] == answer(request, 0)[:1]
    assert reader.tokens[1] == answer(request, 1)
    assert [sample.sample_index for sample in decode.generates[0].samples] == [1]


@pytest.mark.parametrize("plan", [PlanSetting.REMOTE, PlanSetting.LOCAL])
async def test_a_sample_that_its_reader_has_enough_of_is_stopped_while_the_others_go_on(
    plan: PlanSetting,
) -> None:
    decode = _d(pause_at=5)
    async with Fleet(_p(), decode, plan=plan) as fleet:
        task, reader = fleet.begin(new_request(9, num_samples=3), Collector({1: 3}))
        await settle()
        (cancel,) = decode.cancels
        assert (cancel.sample_index, cancel.ticket_id) == (1, decode.generates[0].ticket_id)
        decode.resume.set()
        await task
    assert [len(reader.tokens[index]) for index in range(3)] == [9, 3, 9]


async def test_a_first_token_that_is_enough_needs_no_generate() -> None:
    decode = _d()
    async with Fleet(_p(), decode, **REMOTE) as fleet:
        await fleet.serve(new_request(), Collector({0: 1}))
        await settle()
        assert not decode.generates
        assert len(decode.cancels) == 1


async def test_a_worker_that_cannot_be_cancelled_holds_nobody_up() -> None:
    decode = _d(pause_at=2)
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request())
        await settle()
        decode.is_dead = True  # its calls fail from now on, its streams stay silent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()


async def test_load_that_was_placed_is_counted_until_it_is_gone() -> None:
    decode = _d(pause_at=0)
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request())
        await settle()
        (entry,) = fleet.table.entries()
        assert (entry.num_reserved_tokens, entry.num_reserved_seqs, entry.num_streams) == (10, 1, 0)
        decode.pause_at = 2
        decode.resume.set()
        await settle()
        await task
        assert entry.num_reserved_tokens == entry.num_reserved_seqs == entry.num_streams == 0
        assert entry.num_pending_blocks == 0


async def test_a_prompt_that_is_read_is_a_stream_and_no_longer_ahead() -> None:
    decode = _d(pause_at=2)
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request())
        await settle()
        (entry,) = fleet.table.entries()
        assert (entry.num_ahead_tokens, entry.num_streams, entry.num_seqs) == (0, 1, 1)
        decode.resume.set()
        await task


async def test_a_decode_worker_that_waits_for_a_prefill_is_counted_as_taken() -> None:
    prefill, decode = _p(hold=asyncio.Event()), _d()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        task, _ = fleet.begin(new_request(num_samples=2))
        await settle()
        entries = {entry.ref.worker_id: entry for entry in fleet.table.entries()}
        assert (entries["p"].num_reserved_tokens, entries["p"].num_reserved_seqs) == (10, 2)
        assert (entries["d"].num_reserved_tokens, entries["d"].num_reserved_seqs) == (0, 2)
        assert prefill.hold is not None
        prefill.hold.set()
        await task
        assert all(entry.num_reserved_seqs == 0 for entry in entries.values())


async def test_a_worker_error_names_its_code_in_the_retry_counter() -> None:
    decode = _d(break_at={2: WorkerLost("gone")})
    async with Fleet(decode) as fleet:
        task, _ = fleet.begin(new_request())
        await fleet.pass_by(2.0)
        await task
        text = fleet.metrics.exposition().decode()
    assert 'baton_retries_total{reason="worker_lost"} 1.0' in text
