"""Streams: what running and just ended Generate jobs have produced, for whoever listens.

Owns the events of each (request, attempt), so that a repeated call attaches and replays instead of starting
a second sequence. Does not own sequences: it tells the step loop when the last listener is gone. Lives on
the IO loop; the step thread hands over one batch of deliveries per step.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

from core.clock import Clock
from core.errors import DeadlineExceeded, InvalidRequest, ServingError
from core.ids import RequestId
from core.jobs import GenerateEvent, GenerateJob
from decode_worker.config import DecodeConfig

_GRACE_S = 1.0

StreamKey = tuple[RequestId, int]
"""Request id and attempt: the name of one Generate job."""


def stream_key(job: GenerateJob) -> StreamKey:
    return (job.request.request_id, job.attempt)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step adds to one stream, which for the step thread is only a name. `error` or `is_end` ends
    it.
    """

    stream: Stream
    events: tuple[GenerateEvent, ...] = ()
    error: ServingError | None = None
    is_end: bool = False


class Stream:
    """The events of one job from its start, and the listeners waiting for the next."""

    def __init__(self, job: GenerateJob) -> None:
        self.key = stream_key(job)
        self.num_consumers = 0
        self.ended_at: float | None = None
        self.num_closings = 0
        self.on_end: Callable[[], None] | None = None
        self._request = job.request
        self._starts = {sample.sample_index: sample.emitted for sample in job.samples}
        self._events: list[GenerateEvent] = []
        self._error: ServingError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def num_events(self) -> int:
        """At least one: an end is one too."""
        return len(self._events) + 1

    def extend(self, delivery: Delivery, now: float) -> bool:
        """Add what a step produced (nothing after the end); whether this was the end."""
        if self.ended_at is not None:
            return False
        self._events += delivery.events
        is_end = delivery.error is not None or delivery.is_end
        if is_end:
            self._error = delivery.error
            self.ended_at = now
            if self.on_end is not None:
                self.on_end()
        self._wake()
        return is_end

    async def follow(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Events from the positions that `job` names, replayed as far as they exist, then as they come.

        Raises the error that ended the stream, or InvalidRequest if `job` claims other facts than are here.
        """
        positions = self._positions(job)
        index = 0
        while True:
            while index < len(self._events):
                event = _from_position(self._events[index], positions)
                index += 1
                if event is not None:
                    yield event
            if self._error is not None:
                raise copy.copy(self._error)  # a fresh one: each listener adds its own traceback
            if self.is_ended:
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _positions(self, job: GenerateJob) -> dict[int, int]:
        if job.request != self._request:
            raise InvalidRequest("another request runs under this name", param="request_id")
        positions: dict[int, int] = {}
        for sample in job.samples:
            first = self._starts.get(sample.sample_index)
            if first is None:
                raise InvalidRequest("the running attempt has no such sample", param="samples")
            produced = (*first, *self._tokens_of(sample.sample_index))
            num_common = min(len(produced), len(sample.emitted))
            if len(sample.emitted) < len(first) or produced[:num_common] != sample.emitted[:num_common]:
                raise InvalidRequest(
                    "emitted tokens differ from those of the running attempt", param="samples"
                )
            positions[sample.sample_index] = len(sample.emitted)
        return positions

    def _tokens_of(self, sample_index: int) -> Iterable[int]:
        for event in self._events:
            if event.delta.sample_index == sample_index:
                yield from event.delta.token_ids


class Streams:
    """All streams of the worker. `cancel` hears (on the loop) of a stream whose last listener has gone for
    good.
    """

    def __init__(self, config: DecodeConfig, clock: Clock, cancel: Callable[[Stream], None]) -> None:
        self._config = config
        self._clock = clock
        self._cancel = cancel
        self._streams: dict[StreamKey, Stream] = {}
        self._ended: OrderedDict[StreamKey, int] = OrderedDict()  # to the number of events kept

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_running(self) -> int:
        return len(self._streams) - len(self._ended)

    def open(self, job: GenerateJob) -> tuple[Stream, bool]:
        """The stream of `job` with one more consumer, and whether it is new (then its sequences are to
        start).
        """
        stream = self._streams.get(stream_key(job))
        is_new = stream is None
        if stream is None:
            stream = self._streams[stream_key(job)] = Stream(job)
            # The step loop ends streams at their deadline; this is for the case that it hangs.
            overdue = asyncio.get_running_loop().call_later(
                job.time_left_s + _GRACE_S, self._end_overdue, stream
            )
            stream.on_end = overdue.cancel
        stream.num_consumers += 1
        return stream, is_new

    def close(self, stream: Stream) -> None:
        """One consumer less. After the last, a running stream has `detach_grace_s` until it is cancelled."""
        stream.num_consumers -= 1
        if stream.num_consumers > 0 or stream.is_ended:
            return
        stream.num_closings += 1
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.detach_grace_s, self._cancel_if_abandoned, stream, stream.num_closings)

    def deliver(self, deliveries: Iterable[Delivery]) -> None:
        """Add what one step produced; one wake-up of the loop for all streams."""
        now = self._clock.now()
        for delivery in deliveries:
            stream = delivery.stream
            if stream.extend(delivery, now) and self._streams.get(stream.key) is stream:
                self._ended[stream.key] = stream.num_events
        self._forget(now)

    def end_all(self, error: ServingError) -> None:
        """End every running stream by `error`."""
        self.deliver(
            [Delivery(stream, error=error) for stream in self._streams.values() if not stream.is_ended]
        )

    def _end_overdue(self, stream: Stream) -> None:
        self.deliver(
            [Delivery(stream, error=DeadlineExceeded("the deadline passed and the engine did not answer"))]
        )
        self._cancel(stream)

    def sweep(self) -> None:
        """Forget ended streams that are too old; called now and then."""
        self._forget(self._clock.now())

    def _cancel_if_abandoned(self, stream: Stream, num_closings: int) -> None:
        if stream.num_consumers > 0 or stream.num_closings != num_closings or stream.is_ended:
            return
        # Forgotten at once: a call that comes now finds nobody computing for it and starts anew.
        del self._streams[stream.key]
        self._cancel(stream)

    def _forget(self, now: float) -> None:
        """Drop ended streams in the order they ended, once too old or too many events are kept; who listens
        still has a reference.
        """
        num_kept = sum(self._ended.values())
        while self._ended:
            key, num_events = next(iter(self._ended.items()))
            ended_at = self._streams[key].ended_at
            assert ended_at is not None
            if num_kept <= self._config.max_ended_events and now - ended_at < self._config.replay_s:
                return
            num_kept -= num_events
            del self._ended[key]
            del self._streams[key]


def _from_position(event: GenerateEvent, positions: dict[int, int]) -> GenerateEvent | None:
    """`event` without the tokens before its sample's position; None if nothing of it is wanted."""
    delta = event.delta
    position = positions.get(delta.sample_index)
    if position is None:
        return None
    num_known = position - delta.position
    if num_known <= 0 or not delta.token_ids:
        return event
    if num_known < len(delta.token_ids):
        rest = replace(
            delta,
            position=position,
            token_ids=delta.token_ids[num_known:],
            logprobs=delta.logprobs[num_known:],
        )
        return replace(event, delta=rest)
    if delta.finish_reason is None and not event.prompt_logprobs:
        return None
    last = delta.position + len(delta.token_ids)
    return replace(event, delta=replace(delta, position=last, token_ids=(), logprobs=()))
