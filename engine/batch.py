"""Batch: a StepPlan as flat arrays, one path for chunks, decodes and verified drafts.

Owns the order of tokens in a step and the arithmetic from block tables to slots. Sequences are sorted so that
those which the attention backend can run together lie side by side: many new tokens first, then by length of
context. Pure function of the plan; no tensors of the model, no pool. Called on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a step, sequence after sequence.

    Row s of the arrays per sequence belongs to sequence `order[s]` of the plan, streams before chunks: it
    computes `num_new[s]` tokens after `num_context[s]` computed ones, and they are tokens `starts[s] :
    starts[s] + num_new[s]` of the flat arrays. `block_tables[s]` is padded with the sequence's own first
    block, so that each entry names a block it may read.
    """

    order: Ints  # [num_sequences]
    num_new: Ints  # [num_sequences]
    num_context: Ints  # [num_sequences]
    starts: Ints  # [num_sequences]
    block_tables: Ints  # [num_sequences, max_blocks]
    token_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    token_blocks: Ints  # [num_tokens], block that the token's KV goes to
    token_offsets: Ints  # [num_tokens], place in that block

    @property
    def num_tokens(self) -> int:
        return len(self.token_blocks)

    def rows_by_plan(self) -> Ints:
        """`rows[i]` is the row here of sequence i of the plan."""
        rows = np.empty_like(self.order)
        rows[self.order] = np.arange(len(self.order))
        return rows


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay out the tokens of `plan`. Each sequence must have blocks for its computed and scheduled tokens."""
    num_streams = len(plan.streams)
    num_new = _after(np.ones(num_streams, dtype=np.int64), [i.num_scheduled_tokens for i in plan.chunks])
    num_context = _after(plan.streams.num_tokens - 1, [i.num_context_tokens for i in plan.chunks])
    assert len(num_new), "an empty plan has nothing to run"
    assert num_new.min() > 0, "a scheduled sequence has no token to compute"
    order = np.lexsort((-num_context, -num_new))  # the last key is the first to sort by
    block_tables = _block_tables(plan, -(-(num_context + num_new) // block_size))[order]
    num_new, num_context = num_new[order], num_context[order]
    ends = np.cumsum(num_new)
    starts = ends - num_new
    positions = np.arange(ends[-1]) + np.repeat(num_context - starts, num_new)
    rows = np.repeat(np.arange(len(order)), num_new)
    return Batch(
        order=order,
        num_new=num_new,
        num_context=num_context,
        starts=starts,
        block_tables=block_tables,
        token_ids=torch.from_numpy(_token_ids(plan, order, starts, int(ends[-1]))),
        positions=torch.from_numpy(positions),
        token_blocks=block_tables[rows, positions // block_size],
        token_offsets=positions % block_size,
    )


def _after(streams: Ints, chunks: list[int]) -> Ints:
    return np.concatenate([streams, np.array(chunks, dtype=np.int64)]) if chunks else streams


def _token_ids(plan: StepPlan, order: Ints, starts: Ints, num_tokens: int) -> Ints:
    places = np.empty_like(starts)  # of the first token of each sequence of the plan
    places[order] = starts
    token_ids = np.empty(num_tokens, dtype=np.int64)
    token_ids[places[: len(plan.streams)]] = plan.streams.token_ids
    for item, place in zip(plan.chunks, places[len(plan.streams) :].tolist(), strict=True):
        first, num_new = item.num_context_tokens, item.num_scheduled_tokens
        part = item.sequence.token_ids[first : first + num_new]
        assert len(part) == num_new, "a sequence is scheduled beyond its tokens"
        token_ids[place : place + num_new] = part
    return token_ids


def _block_tables(plan: StepPlan, num_blocks: Ints) -> Ints:
    """In the order of the plan."""
    streams = plan.streams.block_tables
    num_streams, width = streams.shape
    if not plan.chunks:
        return streams
    tables = np.empty((len(num_blocks), int(num_blocks.max())), dtype=np.int64)
    tables[:num_streams, :width] = streams
    tables[:num_streams, width:] = streams[:, :1]
    for row, item in enumerate(plan.chunks, num_streams):
        table, needed = item.sequence.block_table, int(num_blocks[row])
        assert len(table) >= needed, "a scheduled sequence lacks blocks for its tokens"
        tables[row, :needed] = table[:needed]
        tables[row, needed:] = table[0]
    return tables
