"""The plan: which requests are due when, how long they are, and which parts of their prompts are shared.

Owns lengths, parts and moments; the words belong to `prompts`. The same settings, rate and round give the
same plan. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from cluster.loadtest.arrivals import arrival_times
from cluster.loadtest.settings import ArrivalKind, LoadTestSettings, Range, Workload, WorkloadKind
from cluster.loadtest.traces import TraceRecord
from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Part:
    """`num_tokens` of the text that `key` names: equal keys, equal texts from the beginning."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `parts` are new in it; before them stands the conversation so far. `think_s`: from the
    answer before it, 0 for the first.
    """

    parts: tuple[Part, ...]
    num_output_tokens: int
    think_s: float = 0.0

    @property
    def num_new_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, of one turn if it is a single request. `start_s`: when its first request is due,
    counted from the run's start; in a closed loop as soon as a client is free.
    """

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans from one trace or none. `records` is empty unless the workload is a trace."""

    settings: LoadTestSettings
    records: Sequence[TraceRecord] = ()

    @property
    def trace_rate(self) -> float:
        """Requests per second of the trace as it was recorded. Raises InvalidConfig if it has none."""
        span = self.records[-1].arrival_s - self.records[0].arrival_s if self.records else 0.0
        if not span > 0.0:
            raise InvalidConfig("the trace needs requests at more than one moment", key="trace")
        return (len(self.records) - 1) / span

    def sessions(self, rate: float | None, end_s: float | None, round_name: str = "") -> Iterator[Session]:
        """Those that begin before `end_s`. A synthetic workload without it goes on for ever; a trace ends
        with its last request. `rate`: requests per second; None in a closed loop. Prompts of another
        `round_name` share nothing with this one's but what the workload shares anyway.
        """
        kind = self.settings.arrivals.kind
        chance = random.Random(f"{self.settings.seed} {round_name} arrivals")
        contents = self._contents(round_name)
        if kind is ArrivalKind.CLOSED:
            found = (Session(0.0, turns) for turns in contents)
        elif kind is ArrivalKind.TRACE:
            speed = self.settings.arrivals.speed if rate is None else rate / self.trace_rate
            moments = (record.arrival_s / speed for record in self.records)
            found = (Session(time, turns) for time, turns in zip(moments, contents, strict=False))
        else:
            assert rate is not None, "open arrivals have a rate"
            session_rate = rate / self._turns_per_session
            times = arrival_times(kind, session_rate, self.settings.arrivals.cv, chance)
            found = (Session(time, turns) for time, turns in zip(times, contents, strict=False))
        return found if end_s is None else takewhile(lambda session: session.start_s < end_s, found)

    @property
    def _turns_per_session(self) -> float:
        workload = self.settings.workload
        return workload.turns.mean if workload.kind is WorkloadKind.MULTI_TURN else 1.0

    def _contents(self, round_name: str) -> Iterator[tuple[Turn, ...]]:
        workload = self.settings.workload
        if workload.kind is WorkloadKind.TRACE:
            yield from (
                _trace_turns(record, workload, round_name, i) for i, record in enumerate(self.records)
            )
            return
        chance = random.Random(f"{self.settings.seed} {round_name} lengths")
        number = 0
        while True:
            yield _synthetic_turns(workload, chance, f"{round_name}/{number}")
            number += 1


def fitting(records: Sequence[TraceRecord], workload: Workload) -> list[TraceRecord]:
    """The records whose scaled prompt and answer fit `max_context` together."""
    limit = workload.max_context
    scaled = ((record, _trace_turns(record, workload, "", 0)[0]) for record in records)
    return [
        record
        for record, turn in scaled
        if limit is None or turn.num_new_tokens + turn.num_output_tokens <= limit
    ]


def _synthetic_turns(workload: Workload, chance: random.Random, key: str) -> tuple[Turn, ...]:
    has_prefix = workload.kind is not WorkloadKind.RANDOM and workload.prefix_tokens
    prefix = Part(f"prefix {chance.randrange(workload.num_prefixes)}", workload.prefix_tokens)
    num_turns = _draw(workload.turns, chance) if workload.kind is WorkloadKind.MULTI_TURN else 1
    turns = []
    for number in range(num_turns):
        own = Part(f"{key}/{number}", _draw(workload.prompt, chance))
        parts = (prefix, own) if has_prefix and number == 0 else (own,)
        think_s = workload.think_s if number else 0.0
        turns.append(Turn(parts, _draw(workload.output, chance), think_s))
    return tuple(turns)


def _trace_turns(record: TraceRecord, workload: Workload, round_name: str, number: int) -> tuple[Turn, ...]:
    num_prompt_tokens = max(1, round(record.num_prompt_tokens * workload.length_scale))
    num_output_tokens = max(1, round(record.num_output_tokens * workload.length_scale))
    if not record.block_ids:
        return (Turn((Part(f"{round_name}/{number}", num_prompt_tokens),), num_output_tokens),)
    block = record.block_tokens * workload.length_scale
    edges = [min(round(i * block), num_prompt_tokens) for i in range(len(record.block_ids))]
    lengths = [after - before for before, after in pairwise([*edges, num_prompt_tokens])]
    # a trace shares within itself: what one round has cached must not help the next
    parts = [
        Part(f"{round_name} block {block_id}", length)
        for block_id, length in zip(record.block_ids, lengths, strict=True)
        if length
    ]
    return (Turn(tuple(parts), num_output_tokens),)


def _draw(wanted: Range, chance: random.Random) -> int:
    return chance.randint(wanted.low, wanted.high)
