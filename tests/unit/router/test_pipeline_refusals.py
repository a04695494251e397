"""A request that workers refuse or cannot serve: placed again, told when to come again, or at fault."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import (
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    ReservationRefused,
    ServingError,
    StepFailed,
    TransferCorrupt,
)
from tests.doubles import CreepingTime
from tests.unit.router.pipeline_fleet import REMOTE
from tests.unit.router.pipeline_fleet import decode_worker as _d
from tests.unit.router.pipeline_fleet import prefill_worker as _p
from tests.unit.router.scripted import Fleet, answer, new_request


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
