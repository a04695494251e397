"""A mix of requests that a running service answered: what its steps took, and what ran beside them.

Owns finding that in the answers; what follows for prices is `mix_ratios`. While requests come and go, router,
messages and clients have the cores now and then, and caches hold something else: each step takes longer than
in a service that does one thing. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.loadtest.record import RequestRecord
from cluster.simulator.fit import Measured
from cluster.simulator.served_calls import Told
from cluster.simulator.served_sharing import features_of_chunks
from cluster.simulator.step_price import Features

_MIN_STEPS = 100
_MIN_READS = 8
_AFTER_S = 0.01  # a token that a step of a prompt has made is under way for so long at most


@dataclass(frozen=True, slots=True)
class Mixed:
    """One answer of the mix."""

    record: RequestRecord
    told: Told


@dataclass(frozen=True, slots=True)
class OneRead:
    """A prompt that was read while no other one was: all its steps together, and those of them that other
    streams' tokens tell one by one.
    """

    whole: Measured
    steps: Sequence[Measured]


@dataclass(frozen=True, slots=True)
class ReadElsewhere:
    """A prompt that another worker read, no other one meanwhile: all its steps, and for which part of the
    time there were streams beside it.
    """

    whole: Measured
    beside: float


class Mix:
    """All of them."""

    def __init__(self, answers: Sequence[Mixed]) -> None:
        self._answers = answers
        self._reading = [answer.told.reading(0.0) for answer in answers]

    def streams_at(self, moment: float) -> Features:
        """Of a step of those that streamed then."""
        num_streams, num_kv = 0, 0
        for answer in self._answers:
            times = answer.record.event_times_s
            if times[0] <= moment < times[-1]:
                num_streams += 1
                num_kv += answer.told.num_tokens + sum(when <= moment for when in times)
        return 1.0, 0.0, 0.0, float(num_streams), float(num_kv)

    def decoding(self) -> list[Measured]:
        """Steps that read no prompt; none if there were too few."""
        steps = []
        for answer in self._answers:
            times = answer.record.event_times_s
            for before, after in pairwise(times[1:]):
                if not self._is_read_between(before - _AFTER_S, after):
                    steps.append(Measured(self.streams_at(before), after - before))
        return steps if len(steps) >= _MIN_STEPS else []

    def decoding_beside(self) -> list[Measured]:
        """Steps of streams while another worker read, and their own none; none if there were too few."""
        steps = []
        spans = [
            (span, answer.told.is_local) for span, answer in zip(self._reading, self._answers, strict=True)
        ]
        for answer in self._answers:
            for before, after in pairwise(answer.record.event_times_s[1:]):
                is_beside = any(
                    begin < before and after < end for (begin, end), is_local in spans if not is_local
                )
                if is_beside and not any(
                    begin < after and before - _AFTER_S < end for (begin, end), is_local in spans if is_local
                ):
                    steps.append(Measured(self.streams_at(before), after - before))
        return steps if len(steps) >= _MIN_STEPS else []

    def reading_elsewhere(self, alone: Callable[[int], Features]) -> list[ReadElsewhere]:
        """Prompts that another worker read while no other prompt was; none if too few."""
        reads = []
        for answer, (begin, end) in zip(self._answers, self._reading, strict=True):
            told = answer.told
            if told.is_local or self._num_read_between(begin, end) > 1:
                continue
            share = self._streaming_share(begin, end)
            reads.append(ReadElsewhere(Measured(alone(told.num_tokens), told.read_s), share))
        return reads if len(reads) >= _MIN_READS else []

    def _streaming_share(self, begin: float, end: float) -> float:
        """For which part of that time anybody streamed."""
        streaming_s, until = 0.0, begin
        for first, last in sorted(
            (answer.record.event_times_s[0], answer.record.event_times_s[-1]) for answer in self._answers
        ):
            first, last = max(first, until), min(last, end)
            if first < last:
                streaming_s += last - first
                until = last
        return streaming_s / (end - begin)

    def reading(self, alone: Callable[[int], Features], chunk: int) -> list[OneRead]:
        """Prompts that were read by the worker of the streams while no other prompt was; none if too few."""
        reads = []
        for answer, (begin, end) in zip(self._answers, self._reading, strict=True):
            told = answer.told
            if not told.is_local or self._num_read_between(begin, end) > 1:
                continue
            streams = self.streams_at(0.5 * (begin + end))
            if streams[3]:
                features = features_of_chunks(told.num_tokens, chunk, streams)
            else:
                features = alone(told.num_tokens)
            steps = self._steps_of(answer, begin, end, chunk)
            reads.append(OneRead(Measured(features, told.read_s), steps))
        return reads if len(reads) >= _MIN_READS else []

    def _steps_of(self, reader: Mixed, begin: float, end: float, chunk: int) -> list[Measured]:
        """The steps of a prompt between two tokens of the stream that told most: all but its first and last,
        which have another one's tokens, or fewer, in them.
        """
        best: list[Measured] = []
        for answer in self._answers:
            times = [when for when in answer.record.event_times_s if begin < when <= end]
            if answer is reader or len(times) <= len(best) + 1:
                continue
            best = [
                Measured(self._chunk_at(before, number, chunk), after - before)
                for number, (before, after) in enumerate(pairwise(times))
                if (number + 2) * chunk <= reader.told.num_tokens
            ]
        return best

    def _chunk_at(self, moment: float, number: int, chunk: int) -> Features:
        """Of a step of as many tokens, `number` + 1 such steps of the prompt were before."""
        one, _, _, streams, kv_tokens = self.streams_at(moment)
        return one, float(chunk), chunk * ((number + 1.5) * chunk), streams, kv_tokens

    def beside(self) -> list[Told]:
        """Of those that came while others streamed."""
        return [answer.told for answer in self._answers if self.streams_at(answer.told.due_s)[3]]

    def _is_read_between(self, begin: float, end: float) -> bool:
        return self._num_read_between(begin, end) > 0

    def _num_read_between(self, begin: float, end: float) -> int:
        return sum(first < end and begin < last for first, last in self._reading)
