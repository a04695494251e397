"""Streams: the running and just ended Generate jobs of a worker, for whoever listens.

Owns which job has a stream, so that a repeated call attaches and replays instead of starting a second
sequence. Does not own sequences: it tells the step loop when the last listener is gone. Lives on the IO loop;
the step thread hands over one batch of deliveries per step.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from core.clock import Clock
from core.errors import DeadlineExceeded, ServingError
from core.jobs import GenerateJob
from decode_worker.config import DecodeConfig
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, Stream, StreamKey, stream_key

_GRACE_S = 1.0


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

    def deliver(self, deliveries: Iterable[Delivery], tokens: Iterable[StepTokens] = ()) -> None:
        """Add what one step produced, the tokens of samples that go on first; one wake-up of the loop for all
        streams.
        """
        now = self._clock.now()
        for columns in tokens:
            for stream, token in columns.rows():
                stream.add_token(token)
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
