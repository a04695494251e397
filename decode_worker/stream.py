"""Stream: what one Generate job has produced since its start, and who listens to it.

Owns the events of one (request, attempt). Tokens that came by the step are kept as small tuples, and become
events when somebody reads them. Lives on the IO loop; for the step thread a stream is only a name.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

from core.errors import InvalidRequest, ServingError
from core.ids import RequestId
from core.jobs import GenerateEvent, GenerateJob, Reading
from core.request import TokenDelta

StreamKey = tuple[RequestId, int]
"""Request id and attempt: the name of one Generate job."""


def stream_key(job: GenerateJob) -> StreamKey:
    return (job.request.request_id, job.attempt)


PlainToken = tuple[int, int, int, int]
"""Sample index, output index, token id, number of cached prompt tokens: a token without logprobs."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step adds to one stream, which for the step thread is only a name. `error` or `is_end` ends
    it. `reading` goes with the next event of the stream.
    """

    stream: Stream
    events: tuple[GenerateEvent, ...] = ()
    error: ServingError | None = None
    is_end: bool = False
    reading: Reading | None = None


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
        self._events: list[GenerateEvent | PlainToken] = []
        self._readings: dict[int, Reading] = {}  # by the index of the event that they go with
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
        if delivery.reading is not None:
            self._readings[len(self._events)] = delivery.reading
        self._events += delivery.events
        is_end = delivery.error is not None or delivery.is_end
        if is_end:
            self._error = delivery.error
            self.ended_at = now
            if self.on_end is not None:
                self.on_end()
        self._wake()
        return is_end

    def add_token(self, token: GenerateEvent | PlainToken) -> None:
        """Add what a step produced for a sample that goes on (nothing after the end)."""
        if self.ended_at is None:
            self._events.append(token)
            self._wake()

    async def follow(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Events from the positions that `job` names, replayed as far as they exist, then as they come.

        Raises the error that ended the stream, or InvalidRequest if `job` claims other facts than are here.
        """
        positions = self._positions(job)
        index = 0
        while True:
            while index < len(self._events):
                event = _from_position(_event_of(self._events[index]), positions)
                reading = self._readings.get(index)
                index += 1
                if event is not None:
                    yield event if reading is None else replace(event, reading=reading)
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
        for event in map(_event_of, self._events):
            if event.delta.sample_index == sample_index:
                yield from event.delta.token_ids


def _event_of(item: GenerateEvent | PlainToken) -> GenerateEvent:
    if isinstance(item, GenerateEvent):
        return item
    sample_index, position, token_id, num_cached_tokens = item
    return GenerateEvent(TokenDelta(sample_index, position, (token_id,), (), None, num_cached_tokens))


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
