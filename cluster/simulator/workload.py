"""Workload: requests with arrival times, as a simulation takes them.

Owns how a trace's records become requests: equal ids in equal places, equal tokens. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.loadtest.traces import TraceRecord
from cluster.simulator.site_runner import VOCAB_SIZE
from core.ids import RequestId
from core.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request `number` comes at `arrival_s`. Whoever serves it knows `max_tokens`, and not how long the
    answer will be.
    """

    number: int
    arrival_s: float
    record: TraceRecord

    def request(self, max_tokens: int) -> Request:
        """It, as a router takes it: `max_tokens` of its answer, or as many as that is going to have."""
        num_output_tokens = self.record.num_output_tokens
        return Request(
            RequestId(f"r{self.number}"),
            prompt_tokens(self.record, self.number),
            SamplingParams(
                max_tokens=max(max_tokens, num_output_tokens), seed=0, min_tokens=num_output_tokens - 1
            ),
        )


def arrivals_of(
    records: Sequence[TraceRecord], speed: float = 1.0, spread_s: float = 0.0, seed: int = 0
) -> list[Arrival]:
    """The records' requests, `speed` times as many a second, in order of time. `spread_s`: what the trace
    rounds its times to; each request comes at some moment of that. Raises ValueError for a speed or a spread
    that time cannot have.
    """
    if not 0.0 < speed < math.inf:
        raise ValueError(f"speed must be above 0, not {speed}")
    if not 0.0 <= spread_s < math.inf:
        raise ValueError(f"spread must not be below 0, not {spread_s}")
    chance = random.Random(seed)
    times = [(record.arrival_s + spread_s * chance.random()) / speed for record in records]
    order = sorted(range(len(records)), key=lambda index: times[index])
    return [Arrival(number, times[index], records[index]) for number, index in enumerate(order)]


def prompt_tokens(record: TraceRecord, number: int) -> tuple[int, ...]:
    """As many equal tokens as an id stands for, for each; none of them an end of sequence. A record without
    ids shares nothing: `number` is its own.
    """
    num_tokens = record.num_prompt_tokens
    if not record.block_ids:
        return (VOCAB_SIZE - 1 - number,) * num_tokens
    tokens: list[int] = []
    for block_id in record.block_ids:
        tokens += [1 + block_id % (VOCAB_SIZE // 2)] * record.block_tokens
    return tuple(tokens[:num_tokens])
