"""StreamRows: the running streams of a worker as arrays that are kept from step to step.

Owns a mirror of what a step needs of its sequences (last token, length, block table, settings), so that
nothing is gathered from Python objects for each of them. The sequences stay right by themselves: blocks are
theirs and KVCache's, their order and place here is the scheduler's. What is kept is what is known: a step
that still runs is an argument, its streams are counted one token further. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sampling.settings import Ints, Records, settings_of
from engine.sequence import Sequence
from engine.stream_step import NO_STREAMS, TRAITS, UNKNOWN_TOKEN, StreamStep

_NO_ID = -1


class StreamRows:
    """Streams in an order that the owner chooses, each in a slot of its own while it is here.

    `num_blocks` and `num_computed_tokens` are sums over all of them.
    """

    def __init__(self, block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._sequences: list[Sequence] = []
        self._slots: dict[Sequence, int] = {}
        self._members: tuple[Ints, Records, Ints] | None = None  # see `_in_order`; None after a change
        self._free: list[int] = []
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._num_tokens = np.zeros(0, dtype=np.int64)
        self._traits = np.zeros(0, dtype=TRAITS)
        self._end_ids = np.full((0, 1), _NO_ID, dtype=np.int64)
        self._tables = np.zeros((0, 1), dtype=np.int64)
        self._num_named = np.zeros(0, dtype=np.int64)  # blocks in each row of `_tables`, before the padding
        self.num_blocks = 0
        self.num_computed_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._slots

    @property
    def sequences(self) -> list[Sequence]:
        """In order; not to be changed by the reader."""
        return self._sequences

    # ------------------------------------------------------------ members

    def insert(self, index: int, sequence: Sequence) -> None:
        """Take in a stream before the one at `index`. Its computed tokens have blocks; whether the last one
        has is asked by `at_border`.
        """
        assert sequence not in self._slots
        assert sequence.num_output_tokens > 0
        assert sequence.num_uncomputed_tokens == 1
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self._sequences.insert(index, sequence)
        self._slots[sequence] = slot
        self._members = None
        self._token_ids[slot] = sequence.token_ids[-1]
        self._num_tokens[slot] = sequence.num_tokens
        self._traits[slot] = _traits_of(sequence)
        self._write_end_ids(slot, sequence)
        blocks = sequence.block_table[: -(-sequence.num_computed_tokens // self._block_size)]
        self._widen(len(blocks))
        self._tables[slot] = blocks[0]
        self._tables[slot, : len(blocks)] = blocks
        self._num_named[slot] = len(blocks)
        self.num_blocks += len(sequence.block_table)
        self.num_computed_tokens += sequence.num_computed_tokens

    def remove(self, sequence: Sequence) -> None:
        """Let a stream go, while it still has its blocks."""
        self._free.append(self._slots.pop(sequence))
        self._sequences.remove(sequence)
        self._members = None
        self.num_blocks -= len(sequence.block_table)
        self.num_computed_tokens -= sequence.num_computed_tokens

    # ------------------------------------------------------------ one step

    def at_border(self, running: StreamStep = NO_STREAMS) -> list[tuple[Sequence, int]]:
        """Streams whose last token is the first of a block, in order, with their number of tokens; the block
        may have to be found. For `running` see `step`.
        """
        num_tokens, is_due, _ = self._due(running)
        found = np.flatnonzero(((num_tokens - 1) % self._block_size == 0) & is_due)
        return [(self._sequences[index], int(num_tokens[index])) for index in found.tolist()]

    def enter_block(self, sequence: Sequence, num_tokens: int, num_new_blocks: int) -> None:
        """The table of a stream at a border holds its block now; `num_new_blocks` were added to it."""
        index = (num_tokens - 1) // self._block_size
        self._widen(index + 1)
        slot = self._slots[sequence]
        self._tables[slot, index] = sequence.block_table[index]
        self._num_named[slot] = index + 1
        self.num_blocks += num_new_blocks

    def step(self, running: StreamStep = NO_STREAMS) -> StreamStep:
        """All streams as they are. Each must have blocks for all its tokens.

        `running`: rows of a step that runs, all of them still here. Their new tokens are unknown, and those
        that end with them by length are left out.
        """
        if not self._sequences:
            return NO_STREAMS
        slots, traits, end_ids = self._in_order()
        num_tokens, is_due, is_ahead = self._due(running)
        if not is_due.any():
            return NO_STREAMS
        num_blocks = -(-num_tokens // self._block_size)
        assert (num_blocks == self._num_named[slots])[is_due].all(), (
            "a stream lacks a block for its last token"
        )
        step = StreamStep(
            sequences=tuple(self._sequences),
            slots=slots,
            token_ids=np.where(is_ahead, UNKNOWN_TOKEN, self._token_ids[slots]),
            num_tokens=num_tokens,
            block_tables=self._tables[slots, : num_blocks[is_due].max()],
            traits=traits,
            end_ids=end_ids,
        )
        return step if is_due.all() else step.take(np.flatnonzero(is_due))

    def advance(self, step: StreamStep, token_ids: Ints) -> list[Sequence]:
        """The streams of `step` have computed their last token and get the next, one each. Returns those
        whose last block is full of computed tokens now.
        """
        for sequence, token_id in zip(step.sequences, token_ids.tolist(), strict=True):
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(token_id)
        self._token_ids[step.slots] = token_ids
        self._num_tokens[step.slots] += 1
        self.num_computed_tokens += len(step)
        full = np.flatnonzero(step.num_tokens % self._block_size == 0)
        return [step.sequences[index] for index in full.tolist()]

    def check(self) -> None:
        """Assert that the arrays say what the sequences say."""
        assert len(set(self._slots.values())) == len(self._slots) == len(self._sequences)
        assert not set(self._slots.values()) & set(self._free)
        for sequence in self._sequences:
            slot = self._slots[sequence]
            num_blocks = int(self._num_named[slot])
            blocks = sequence.block_table[:num_blocks]
            assert num_blocks * self._block_size >= sequence.num_computed_tokens
            assert sequence.num_uncomputed_tokens == 1
            assert self._token_ids[slot] == sequence.token_ids[-1]
            assert self._num_tokens[slot] == sequence.num_tokens
            assert self._tables[slot, :num_blocks].tolist() == blocks, "a row names other blocks"
            assert set(self._tables[slot].tolist()) <= set(sequence.block_table), (
                "a row names a foreign block"
            )
        assert self.num_blocks == sum(len(sequence.block_table) for sequence in self._sequences)
        assert self.num_computed_tokens == sum(sequence.num_computed_tokens for sequence in self._sequences)

    # ------------------------------------------------------------ inside

    def _due(self, running: StreamStep) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
        """For each stream in order: its tokens once `running` has ended, whether it has another one to
        compute then, and whether it is among `running`.
        """
        slots, traits, _ = self._in_order()
        num_tokens = self._num_tokens[slots]
        if not len(running):
            return num_tokens, np.ones(len(slots), dtype=np.bool_), np.zeros(len(slots), dtype=np.bool_)
        is_running = np.zeros(len(self._num_tokens), dtype=np.bool_)
        is_running[running.slots] = True
        is_ahead = is_running[slots]
        num_tokens += is_ahead
        return num_tokens, ~(is_ahead & (num_tokens >= traits["max_tokens"])), is_ahead

    def _in_order(self) -> tuple[Ints, Records, Ints]:
        """Slots, traits and ids that end, in the order of `_sequences`: the same until somebody comes or
        goes.
        """
        if self._members is None:
            slots = np.array([self._slots[sequence] for sequence in self._sequences], dtype=np.int64)
            self._members = slots, self._traits[slots], self._end_ids[slots]
        return self._members

    def _add_slots(self) -> None:
        """Twice as many."""
        old, num = len(self._token_ids), max(16, 2 * len(self._token_ids))
        self._free = list(range(num - 1, old - 1, -1))
        arrays = (
            self._token_ids,
            self._num_tokens,
            self._traits,
            self._end_ids,
            self._tables,
            self._num_named,
        )
        for array in arrays:
            # nothing else refers to them: a step has copies
            array.resize((num, *array.shape[1:]), refcheck=False)

    def _widen(self, num_blocks: int) -> None:
        """Make room for so many blocks in each table, filled with its first."""
        width = self._tables.shape[1]
        if num_blocks > width:
            more = np.repeat(self._tables[:, :1], max(num_blocks - width, width), axis=1)
            self._tables = np.hstack((self._tables, more))

    def _write_end_ids(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        ids = set(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
        num_more = len(ids) - self._end_ids.shape[1]
        if num_more > 0:
            self._end_ids = np.pad(self._end_ids, ((0, 0), (0, num_more)), constant_values=_NO_ID)
        self._end_ids[slot] = _NO_ID
        self._end_ids[slot, : len(ids)] = sorted(ids)


def _traits_of(sequence: Sequence) -> tuple[Any, ...]:
    sampling, num_prompt = sequence.request.sampling, sequence.num_prompt_tokens
    return (
        settings_of(sampling, sequence.sample_index),
        sequence.sample_index,
        num_prompt,
        sequence.num_cached_tokens,
        num_prompt + sampling.min_tokens,
        min(num_prompt + sampling.max_tokens, sequence.max_context),
    )
