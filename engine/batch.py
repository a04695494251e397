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

    Row s of the arrays per sequence belongs to `plan.scheduled[order[s]]`: it computes `num_new[s]` tokens
    after `num_context[s]` computed ones, and they are tokens `starts[s] : starts[s] + num_new[s]` of the flat
    arrays. `block_tables[s]` is padded with the sequence's own first block, so that each entry names a block
    it may read.
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
        """`rows[i]` is the row here of `plan.scheduled[i]`."""
        rows = np.empty_like(self.order)
        rows[self.order] = np.arange(len(self.order))
        return rows


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay out the tokens of `plan`. Each sequence must have blocks for its computed and scheduled tokens."""
    scheduled = plan.scheduled
    assert scheduled, "an empty plan has nothing to run"
    num_new = np.array([item.num_scheduled_tokens for item in scheduled], dtype=np.int64)
    num_context = np.array([item.sequence.num_computed_tokens for item in scheduled], dtype=np.int64)
    assert num_new.min() > 0, "a scheduled sequence has no token to compute"
    order = np.lexsort((-num_context, -num_new))  # the last key is the first to sort by
    num_new, num_context = num_new[order], num_context[order]
    token_ids: list[int] = []
    for index, context, new in zip(order.tolist(), num_context.tolist(), num_new.tolist(), strict=True):
        token_ids += scheduled[index].sequence.token_ids[context : context + new]
    ends = np.cumsum(num_new)
    starts = ends - num_new
    assert len(token_ids) == ends[-1], "a sequence is scheduled beyond its tokens"
    positions = np.arange(ends[-1]) + np.repeat(num_context - starts, num_new)
    block_tables = _block_tables(plan, order, -(-(num_context + num_new) // block_size))
    rows = np.repeat(np.arange(len(order)), num_new)
    return Batch(
        order=order,
        num_new=num_new,
        num_context=num_context,
        starts=starts,
        block_tables=block_tables,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        token_blocks=block_tables[rows, positions // block_size],
        token_offsets=positions % block_size,
    )


def _block_tables(plan: StepPlan, order: Ints, num_blocks: Ints) -> Ints:
    tables = np.empty((len(order), int(num_blocks.max())), dtype=np.int64)
    for row, (index, needed) in enumerate(zip(order.tolist(), num_blocks.tolist(), strict=True)):
        table = plan.scheduled[index].sequence.block_table
        assert len(table) >= needed, "a scheduled sequence lacks blocks for its tokens"
        tables[row, :needed] = table[:needed]
        tables[row, needed:] = table[0]
    return tables
