"""AttentionPlan: what of a step's attention is computed together.

Owns the cutting of a batch into pieces of work: row tiles of a sequence's new tokens, and for few new tokens
also splits of its context, so that one long sequence keeps all threads busy. The sizes of tiles and splits
never depend on the batch, and the arithmetic does not depend on which of the two was done (`kernels.h`
merges the same splits in the same order). Pure function of the batch. Called on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.batch import Batch, Ints

_ROWS = 72
"""Query rows (tokens times the query heads of a KV head) of a piece."""

_SPLIT = 256
"""Slots of the context that are accumulated together; the same number is in `kernels.h`."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """All arrays are contiguous int64."""

    tables: Ints  # [num_sequences, max_blocks]
    items: Ints  # [num_items, 6]: sequence, first flat token, tokens, its position, split or -1, group
    groups: Ints  # [num_groups, 2]: first item, items; the splits of one row tile
    token_blocks: Ints  # [num_tokens]
    token_offsets: Ints  # [num_tokens]


def plan_attention(batch: Batch, heads_per_kv_head: int) -> AttentionPlan:
    tokens_per_tile = max(1, _ROWS // heads_per_kv_head)
    num_tiles = -(-batch.num_new // tokens_per_tile)
    sequence = np.repeat(np.arange(len(batch.num_new)), num_tiles)
    first = (_places(num_tiles)) * tokens_per_tile
    # From the last tile to the first: it sees the most keys, and long pieces should start early.
    first = (num_tiles[sequence] - 1) * tokens_per_tile - first
    num_tokens = np.minimum(tokens_per_tile, batch.num_new[sequence] - first)
    position = batch.num_context[sequence] + first
    num_splits = -(-(position + num_tokens) // _SPLIT)
    num_items = np.where(num_tiles[sequence] > 1, 1, num_splits)
    is_split = num_items > 1
    items = np.stack((sequence, batch.starts[sequence] + first, num_tokens, position), axis=1)
    tile = np.repeat(np.arange(len(items)), num_items)
    group = np.cumsum(is_split) - 1
    split = np.where(is_split[tile], _places(num_items), -1)
    starts = np.cumsum(num_items) - num_items
    groups = np.stack((starts, num_items), axis=1)[is_split]
    return AttentionPlan(
        tables=np.ascontiguousarray(batch.block_tables),
        items=np.ascontiguousarray(np.column_stack((items[tile], split, group[tile]))),
        groups=np.ascontiguousarray(groups),
        token_blocks=np.ascontiguousarray(batch.token_blocks),
        token_offsets=np.ascontiguousarray(batch.token_offsets),
    )


def _places(counts: Ints) -> Ints:
    """`[2, 3]` to `[0, 1, 0, 1, 2]`."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
