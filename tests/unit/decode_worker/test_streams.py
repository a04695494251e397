"""What streams promise to listeners that come, go and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from core.errors import DeadlineExceeded, InvalidRequest, StepFailed
from core.jobs import GenerateEvent, GenerateJob
from core.request import FinishReason, TokenDelta, TokenLogprob
from decode_worker.config import DecodeConfig
from decode_worker.stream import Delivery, Stream
from decode_worker.streams import Streams
from tests.doubles import FakeClock
from tests.unit.decode_worker.decode_cases import make_job, make_request


class Room:
    """Streams with a clock, and the streams they cancelled."""

    def __init__(self, **config: float) -> None:
        self.clock = FakeClock()
        self.cancelled: list[Stream] = []
        values: dict[str, float] = {"detach_grace_s": 0.0, **config}
        self.streams = Streams(DecodeConfig(**values), self.clock, self.cancelled.append)  # type: ignore[arg-type]

    async def listen(self, job: GenerateJob) -> list[GenerateEvent]:
        """All events until the end."""
        stream, _ = self.streams.open(job)
        try:
            return [event async for event in stream.follow(job)]
        finally:
            self.streams.close(stream)


def event(position: int, *tokens: int, sample: int = 0, finish: FinishReason | None = None) -> GenerateEvent:
    logprobs = tuple(TokenLogprob(token, -1.0) for token in tokens)
    return GenerateEvent(TokenDelta(sample, position, tokens, logprobs, finish))


def tokens_of(events: list[GenerateEvent], sample: int = 0) -> list[int]:
    found: list[int] = []
    for item in events:
        if item.delta.sample_index == sample:
            assert item.delta.position + len(item.delta.token_ids) >= len(found)
            found += item.delta.token_ids
    return found


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_listener_gets_events_as_they_come_and_ends_with_the_stream() -> None:
    room = Room()
    job = make_job(make_request(4))
    listening = asyncio.create_task(room.listen(job))
    await settle()
    (stream,) = room.streams._streams.values()
    room.streams.deliver([Delivery(stream, (event(0, 7),))])
    await settle()
    room.streams.deliver([Delivery(stream, (event(1, 8, finish=FinishReason.LENGTH),), is_end=True)])
    assert tokens_of(await listening) == [7, 8]
    assert room.cancelled == []


async def test_a_repeated_call_attaches_to_the_same_stream_and_replays_from_its_position() -> None:
    room = Room()
    job = make_job(make_request(4))
    stream, is_new = room.streams.open(job)
    assert is_new
    room.streams.deliver([Delivery(stream, (event(0, 7), event(1, 8)))])
    again = make_job(make_request(4), emitted=(7,))
    same, is_new = room.streams.open(again)
    assert same is stream
    assert not is_new
    room.streams.deliver([Delivery(stream, (event(2, 9, finish=FinishReason.STOP),), is_end=True)])
    replayed = [item async for item in same.follow(again)]
    assert [(item.delta.position, item.delta.token_ids) for item in replayed] == [(1, (8,)), (2, (9,))]
    assert all(len(item.delta.logprobs) == len(item.delta.token_ids) for item in replayed)


async def test_a_replay_cuts_inside_a_delta_of_several_tokens() -> None:
    room = Room()
    stream, _ = room.streams.open(make_job(make_request(4)))
    room.streams.deliver([Delivery(stream, (event(0, 7, 8, 9, finish=FinishReason.STOP),), is_end=True)])
    replayed = await room.listen(make_job(make_request(4), emitted=(7, 8)))
    assert [(item.delta.position, item.delta.token_ids) for item in replayed] == [(2, (9,))]
    finished = await room.listen(make_job(make_request(4), emitted=(7, 8, 9)))
    assert [(item.delta.token_ids, item.delta.finish_reason) for item in finished] == [
        ((), FinishReason.STOP)
    ]


async def test_an_ended_stream_is_replayed_for_a_while_and_then_forgotten() -> None:
    room = Room(replay_s=10.0)
    job = make_job(make_request(4))
    stream, _ = room.streams.open(job)
    room.streams.deliver([Delivery(stream, (event(0, 7, finish=FinishReason.STOP),), is_end=True)])
    room.streams.close(stream)
    assert tokens_of(await room.listen(job)) == [7]
    room.clock.advance(10.0)
    room.streams.sweep()
    assert len(room.streams) == 0
    assert room.streams.open(job)[1]


async def test_the_events_kept_of_ended_streams_are_bounded() -> None:
    room = Room(max_ended_events=10, replay_s=1000.0)
    for index in range(10):
        stream, _ = room.streams.open(make_job(make_request(4, f"r{index}")))
        room.streams.deliver([Delivery(stream, (event(0, 7), event(1, 8)), is_end=True)])
    assert len(room.streams) == 3
    assert room.streams.open(make_job(make_request(4, "r9")))[1] is False


async def test_the_last_listener_leaving_cancels_after_the_grace() -> None:
    room = Room()
    job = make_job(make_request(4))
    first, _ = room.streams.open(job)
    second, _ = room.streams.open(job)
    room.streams.close(first)
    await settle()
    assert room.cancelled == []
    room.streams.close(second)
    await asyncio.sleep(0.01)
    assert room.cancelled == [first]
    assert room.streams.num_running == 0


async def test_a_listener_that_comes_back_within_the_grace_keeps_the_stream() -> None:
    room = Room(detach_grace_s=0.02)
    job = make_job(make_request(4))
    stream, _ = room.streams.open(job)
    room.streams.close(stream)
    assert room.streams.open(job) == (stream, False)
    await asyncio.sleep(0.04)
    assert room.cancelled == []


async def test_events_of_a_cancelled_stream_never_reach_a_new_one_of_the_same_name() -> None:
    room = Room()
    job = make_job(make_request(4))
    old, _ = room.streams.open(job)
    room.streams.close(old)
    await asyncio.sleep(0.01)
    new, is_new = room.streams.open(job)
    assert is_new
    room.streams.deliver([Delivery(old, (event(5, 55),))])
    room.streams.deliver([Delivery(new, (event(0, 7),), is_end=True)])
    assert tokens_of([item async for item in new.follow(job)]) == [7]


async def test_an_error_ends_the_stream_for_each_listener_after_the_tokens_before_it() -> None:
    room = Room()
    job = make_job(make_request(4))
    stream, _ = room.streams.open(job)
    room.streams.deliver([Delivery(stream, (event(0, 7),), error=StepFailed("broken", worker_id="d"))])
    for _ in range(2):
        seen: list[GenerateEvent] = []
        with pytest.raises(StepFailed, match="broken") as caught:
            await collect(stream.follow(job), seen)
        assert tokens_of(seen) == [7]
        assert caught.value.details == {"worker_id": "d"}


async def collect(events: AsyncIterator[GenerateEvent], into: list[GenerateEvent]) -> None:
    async for item in events:
        into.append(item)


@pytest.mark.parametrize("emitted", [(6,), (5, 9)])
async def test_a_repeated_call_with_other_facts_is_refused(emitted: tuple[int, ...]) -> None:
    room = Room()
    stream, _ = room.streams.open(make_job(make_request(4), emitted=(5,)))
    room.streams.deliver([Delivery(stream, (event(1, 7),))])
    with pytest.raises(InvalidRequest):
        await room.listen(make_job(make_request(4), emitted=emitted))


async def test_attempts_are_different_streams() -> None:
    room = Room()
    first, _ = room.streams.open(make_job(make_request(4), attempt=0))
    second, is_new = room.streams.open(make_job(make_request(4), attempt=1))
    assert is_new
    assert second is not first


async def test_a_listener_that_stops_early_detaches() -> None:
    room = Room()
    job = make_job(make_request(4))
    stream, _ = room.streams.open(job)
    room.streams.deliver([Delivery(stream, (event(0, 7), event(1, 8)))])
    async with aclosing(stream.follow(job)) as events:  # type: ignore[type-var]
        async for _ in events:
            break
    room.streams.close(stream)
    await asyncio.sleep(0.01)
    assert room.cancelled == [stream]


async def test_a_stream_whose_engine_hangs_ends_at_its_deadline_all_the_same() -> None:
    room = Room()
    job = make_job(make_request(4), time_left_s=-1.0)
    with pytest.raises(DeadlineExceeded):
        await room.listen(job)
    assert len(room.cancelled) == 1


async def test_a_listener_hears_only_of_the_samples_it_asked_for() -> None:
    room = Room()
    both = make_job(make_request(4, num_samples=2))
    stream, _ = room.streams.open(both)
    room.streams.deliver([Delivery(stream, (event(0, 7), event(0, 8, sample=1)), is_end=True)])
    one = await room.listen(replace(both, samples=both.samples[:1]))
    assert tokens_of(one) == [7]
    assert tokens_of(one, sample=1) == []


async def test_another_request_under_the_same_name_is_refused() -> None:
    room = Room()
    stream, _ = room.streams.open(make_job(make_request(4)))
    room.streams.deliver([Delivery(stream, (event(0, 7),), is_end=True)])
    with pytest.raises(InvalidRequest):
        await room.listen(make_job(make_request(4, first=1)))
