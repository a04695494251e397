"""A device that computes nothing but remembers everything: KV slots hold token ids, and what it samples is a
function of the ids that the block tables lead to.

So a token that was read from the wrong block, written to somebody else's or taken from the wrong stream
gives another answer than `answer_of`. Steps run in the order of their starts, take `step_s` each on a clock
that only the test moves, and their results are there when they have ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from core.errors import StepFailed
from core.kv_layout import KVLayout
from engine.sampling.sampled import SampledColumns, SampledToken
from engine.step import ScheduledSequence, StepOutput, StepPlan
from engine.stream_step import UNKNOWN_TOKEN
from tests.doubles import FakeClock

NUM_TOKENS = 12
"""Ids that it samples: 0 to 11."""


def next_token(token_ids: Sequence[int], sample_index: int) -> int:
    digest = hashlib.blake2b(repr((list(token_ids), sample_index)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % NUM_TOKENS


def answer_of(prompt: Sequence[int], sample_index: int, num: int, end_ids: frozenset[int]) -> list[int]:
    """What a sample must come to: `num` tokens or up to the first of `end_ids`."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num:
        token_ids.append(next_token(token_ids, sample_index))
        if token_ids[-1] in end_ids:
            break
    return token_ids[len(prompt) :]


class RunningOnDevice:
    def __init__(self, device: SimulatedDevice, ends_at: float, output: StepOutput | None) -> None:
        self._device, self._ends_at, self._output = device, ends_at, output

    def result(self) -> StepOutput:
        self._device.wait_until(self._ends_at)
        if self._output is None:
            raise StepFailed("logits are not finite")
        return self._output


class SimulatedDevice:
    """A `StepRunner`. `is_failing` says of a plan whether its step fails; `idle_s` is how long nothing ran
    between two steps.
    """

    was_beside: bool | None = False

    def __init__(self, layout: KVLayout, clock: FakeClock, is_overlapped: bool, step_s: float = 1.0) -> None:
        self._block_size = layout.block_size
        self._clock = clock
        self.is_overlapped = is_overlapped
        self.step_s = step_s
        self.is_failing: Callable[[StepPlan], bool] = lambda plan: False
        self.plans: list[StepPlan] = []
        self.idle_s = 0.0
        self._free_at = clock.now()
        self._slots: dict[tuple[int, int], int] = {}  # KV
        self._newest: dict[int, int] = {}  # tokens of streams, see TokenFeed

    def start(self, plan: StepPlan) -> RunningOnDevice:
        begins_at = max(self._clock.now(), self._free_at)
        if self.plans:
            self.idle_s += begins_at - self._free_at
        self._free_at = begins_at + self.step_s
        self.plans.append(plan)
        output = self._compute(plan)
        return RunningOnDevice(self, self._free_at, None if self.is_failing(plan) else output)

    def wait_until(self, moment: float) -> None:
        self._clock.advance(max(0.0, moment - self._clock.now()))

    def _compute(self, plan: StepPlan) -> StepOutput:
        streams = plan.streams
        drawn = []
        for row in range(len(streams)):
            token_id, slot = int(streams.token_ids[row]), int(streams.slots[row])
            if token_id == UNKNOWN_TOKEN:
                token_id = self._newest[slot]
            num_tokens, table = int(streams.num_tokens[row]), streams.block_tables[row].tolist()
            self._write(table, num_tokens - 1, [token_id])
            drawn.append(next_token(self._read(table, num_tokens), int(streams.traits["sample_index"][row])))
        self._newest.update(zip(streams.slots.tolist(), drawn, strict=True))
        columns = SampledColumns(np.array(drawn, dtype=np.int64), np.zeros(len(drawn)), {})
        return StepOutput(tuple(self._read_chunk(item) for item in plan.chunks), {}, columns)

    def _read_chunk(self, item: ScheduledSequence) -> tuple[SampledToken, ...]:
        sequence, first = item.sequence, item.num_context_tokens
        end = first + item.num_scheduled_tokens
        self._write(sequence.block_table, first, sequence.token_ids[first:end])
        if not (item.is_sampled and item.reaches_end):
            return ()
        known = self._read(sequence.block_table, end)
        samples = item.sample_indices or (sequence.sample_index,)
        return tuple(SampledToken(sample, next_token(known, sample), None, 1.0) for sample in samples)

    def _write(self, table: list[int], first: int, token_ids: list[int]) -> None:
        for index, token_id in enumerate(token_ids, first):
            self._slots[table[index // self._block_size], index % self._block_size] = token_id

    def _read(self, table: list[int], num_tokens: int) -> list[int]:
        size = self._block_size
        return [self._slots[table[index // size], index % size] for index in range(num_tokens)]

    def copy(self, source: int, target: int) -> None:
        """A block's content, as the pool copies it."""
        for offset in range(self._block_size):
            if (source, offset) in self._slots:
                self._slots[target, offset] = self._slots[source, offset]
