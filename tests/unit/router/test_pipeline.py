"""A request's way through the workers when nothing fails, and its ends."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import (
    DeadlineExceeded,
    WorkerLost,
)
from core.request import FinishReason
from router.config import PlanSetting
from router.decision import Plan
from tests.doubles import settle
from tests.unit.router.pipeline_fleet import REMOTE
from tests.unit.router.pipeline_fleet import decode_worker as _d
from tests.unit.router.pipeline_fleet import prefill_worker as _p
from tests.unit.router.scripted import Collector, Fleet, answer, new_request


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
