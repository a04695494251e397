"""A mix of requests that a running service answered, and how much longer its steps took than one at a time.

Owns what follows from such answers. While requests come and go, router, messages and clients have the cores
now and then, and caches hold something else: each step takes longer than in a service that does one thing.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cluster.loadtest.record import RequestRecord
from cluster.simulator.served_calls import Told
from cluster.simulator.served_sharing import features_of_chunks
from cluster.simulator.step_price import Features, StepPrice

_MIN_STEPS = 100
_MIN_READS = 8
_AFTER_S = 0.01  # a token that a step of a prompt has made is under way for so long at most


@dataclass(frozen=True, slots=True)
class Mixed:
    """One answer of the mix."""

    record: RequestRecord
    told: Told


@dataclass(frozen=True, slots=True)
class Timed:
    """What something took, and what its price says."""

    took_s: float
    priced_s: float

    @property
    def ratio(self) -> float:
        return self.took_s / self.priced_s


def times_price(timed: Sequence[Timed]) -> float:
    """How many times their price they took; 1 if there are none."""
    return sum(item.took_s for item in timed) / sum(item.priced_s for item in timed) if timed else 1.0


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

    def decoding(self, price: StepPrice) -> Sequence[Timed]:
        """Steps that read no prompt; none if there were too few."""
        steps = []
        for answer in self._answers:
            times = answer.record.event_times_s
            for before, after in pairwise(times[1:]):
                if not self._is_read_between(before - _AFTER_S, after):
                    steps.append(Timed(after - before, price.seconds(self.streams_at(before))))
        return steps if len(steps) >= _MIN_STEPS else []

    def reading(self, price: StepPrice, alone: Callable[[int], Features], chunk: int) -> Sequence[Timed]:
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
            reads.append(Timed(told.read_s, price.seconds(features)))
        return reads if len(reads) >= _MIN_READS else []

    def beside(self) -> list[Told]:
        """Of those that came while others streamed."""
        return [answer.told for answer in self._answers if self.streams_at(answer.told.due_s)[3]]

    def _is_read_between(self, begin: float, end: float) -> bool:
        return self._num_read_between(begin, end) > 0

    def _num_read_between(self, begin: float, end: float) -> int:
        return sum(first < end and begin < last for first, last in self._reading)


def scaled(price: StepPrice, decoding: float, reading: float) -> StepPrice:
    """`price`, of steps of streams alone `decoding` times, of all others `reading` times."""
    return replace(
        price,
        fixed_s=price.fixed_s * reading,
        token_s=price.token_s * reading,
        pair_s=price.pair_s * reading,
        stream_s=price.stream_s * reading,
        kv_s=price.kv_s * reading,
        batches=tuple(
            replace(batch, fixed_s=batch.fixed_s * decoding, kv_s=batch.kv_s * decoding)
            for batch in price.batches
        ),
    )
