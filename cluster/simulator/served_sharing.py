"""What workers of one host cost each other, from prompts that a running service read while streams ran.

Owns what follows from such answers. Where a prompt is read is the router's choice, which the answer tells:
by the worker that decodes, in steps together with its streams, or by another one beside it. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.loadtest.record import RequestRecord
from cluster.simulator.fit import Measured
from cluster.simulator.served_calls import Told, all_streaming, num_between
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import Features, StepPrice

_MIN_STEPS = 3
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Beside:
    """One round: answers that streamed all the while, behind prompts of `num_stream` tokens, and the prompts
    that were read meanwhile.
    """

    streams: Sequence[RequestRecord]
    num_stream: int
    reads: Sequence[Told]

    def within(self) -> list[Told]:
        """The prompts that were read while all streamed."""
        first, last = all_streaming(self.streams)
        return [told for told in self.reads if first < told.due_s and told.first_at_s < last]

    def decoding(self, streaming: Span) -> Features:
        """Of one step of the streams alone, in the middle of that time."""
        num_streams = len(self.streams)
        middle = sum(streaming) / 2
        num_tokens = num_between(self.streams, 0.0, middle)
        return 1.0, 0.0, 0.0, float(num_streams), num_streams * (self.num_stream + num_tokens)


def features_of_chunks(num_tokens: int, chunk: int, decoding: Features) -> Features:
    """Of all the steps that read a prompt together, `chunk` tokens at a time, beside streams."""
    num_steps = -(-num_tokens // chunk)
    one, _, _, streams, kv_tokens = decoding
    return (
        one * num_steps,
        float(num_tokens),
        0.5 * num_tokens * num_tokens,
        streams * num_steps,
        kv_tokens * num_steps,
    )


def mixed_steps(rounds: Sequence[Beside], chunk: int) -> list[Measured]:
    """Steps of prompts that were read by the worker of the streams while no other prompt was."""
    found = []
    for beside in rounds:
        for told in beside.within():
            if told.is_local and not any(_overlap(told, other) for other in beside.reads):
                decoding = beside.decoding(_span(told))
                found.append(Measured(features_of_chunks(told.num_tokens, chunk, decoding), told.read_s))
    return found


def sharing_of(
    rounds: Sequence[Beside],
    price: StepPrice,
    features: Callable[[int], Features],
    assumed: Sharing,
) -> Sharing:
    """How many times as long steps take beside another worker's. `features` of a prompt that is read alone;
    `assumed` where no prompt was read beside streams, or none for long enough.
    """
    reading: list[float] = []
    decoding: list[float] = []
    for beside in rounds:
        locals_ = [_span(told) for told in beside.reads if told.is_local]
        for told in beside.within():
            if told.is_local:
                continue
            reading.append(told.read_s / price.seconds(features(told.num_tokens)))
            for span in _without(_span(told), locals_):
                num_steps = num_between(beside.streams, *span)
                if num_steps >= _MIN_STEPS:
                    alone_s = price.seconds(beside.decoding(span))
                    decoding.append((span[1] - span[0]) / num_steps / alone_s)
    return Sharing(
        assumed.num_cores,
        max(1.0, statistics.median(reading)) if reading else assumed.reading,
        max(1.0, statistics.median(decoding)) if decoding else assumed.decoding,
    )


def _span(told: Told) -> Span:
    # the way back of its token is a small part of what it waited for besides
    return told.reading(0.0)


def _overlap(told: Told, other: Told) -> bool:
    if other is told:
        return False
    (first, last), (begin, end) = _span(told), _span(other)
    return first < end and begin < last


def _without(span: Span, others: Sequence[Span]) -> list[Span]:
    """The parts of `span` that lie in none of the others."""
    left = [span]
    for begin, end in others:
        parts: list[Span] = []
        for first, last in left:
            parts += [(first, min(last, begin)), (max(first, end), last)]
        left = [part for part in parts if part[0] < part[1]]
    return left
