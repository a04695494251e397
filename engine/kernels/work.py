"""StepWork: a step's attention cut into the pieces that kernels run, as small integer arrays on the device.

Owns the cutting. Its sizes come from the tables and a sequence's own length, never from the rest of the
batch. Up to `MAX_QUERIES` new tokens of a sequence go through the decode kernel, more through the prefill
kernel. Pure function of the batch, apart from one copy to the device. Called on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, Ints

_Integers = NDArray[np.signedinteger[Any]]

MAX_QUERIES = 8
"""New tokens that a sequence may have in the decode kernel: a sampled one and seven drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillWork:
    """`tiles` int32 `[num_tiles, 5]`: sequence, first new token of the tile, and the sequence's first flat
    token, new and context.

    The tiles that see the most keys come first, so that no long one is left for the end.
    """

    tiles: torch.Tensor
    tables: torch.Tensor  # int32 [num_sequences, max_blocks]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """Sequences of at most `queries` new tokens: 1, or `MAX_QUERIES`.

    `items` int32 `[capacity, 5]`: sequence, split, first flat token, new, context; the first `num_items [1]`
    count. `merges` int32 `[num_sequences, 4]`: first item, first flat token, new, context.
    """

    queries: int
    split: int  # keys in a split
    items: torch.Tensor
    num_items: torch.Tensor
    merges: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """All that a step's layers need to know besides their tensors."""

    prefill: PrefillWork | None
    decodes: tuple[DecodeWork, ...]
    slots: torch.Tensor  # int64 [num_tokens], where a token's keys and values go


def plan_work(
    batch: Batch, tokens_per_tile: int, split: int, block_size: int, device: torch.device
) -> StepWork:
    """Cut `batch` into prefill tiles of so many tokens and decode splits of so many keys."""
    slots = (batch.token_blocks * block_size + batch.token_offsets).view(np.int32)  # two words each
    is_prefill = batch.num_new > MAX_QUERIES
    prefills = np.flatnonzero(is_prefill)
    by_queries = {
        1: np.flatnonzero(batch.num_new == 1),
        MAX_QUERIES: np.flatnonzero((batch.num_new > 1) & ~is_prefill),
    }
    parts: list[_Integers] = [slots, batch.block_tables]
    if len(prefills):
        parts.append(_tiles(batch, prefills, tokens_per_tile))
    decodes = {queries: rows for queries, rows in by_queries.items() if len(rows)}
    for rows in decodes.values():
        parts += _splits(batch, rows, split)
    slots_moved, tables, *arrays = _on_device(parts, device)
    prefill = PrefillWork(arrays.pop(0), tables) if len(prefills) else None
    works = []
    for queries in decodes:
        items, num_items, merges, *arrays = arrays
        works.append(DecodeWork(queries, split, items, num_items, merges, tables))
    return StepWork(prefill, tuple(works), slots_moved.view(torch.int64))


def _tiles(batch: Batch, rows: Ints, tokens_per_tile: int) -> Ints:
    num_new, context = batch.num_new[rows], batch.num_context[rows]
    counts = -(-num_new // tokens_per_tile)
    of = np.repeat(np.arange(len(rows)), counts)
    first = _places(counts) * tokens_per_tile
    tiles = np.stack((rows[of], first, batch.starts[rows][of], num_new[of], context[of]), axis=1)
    num_keys = context[of] + np.minimum(first + tokens_per_tile, num_new[of])
    return tiles[np.argsort(-num_keys, kind="stable")]


def _splits(batch: Batch, rows: Ints, split: int) -> list[Ints]:
    """Items, their number, merges."""
    start, num_new, context = batch.starts[rows], batch.num_new[rows], batch.num_context[rows]
    counts = -(-(context + num_new) // split)
    of = np.repeat(np.arange(len(rows)), counts)
    items = np.stack((rows[of], _places(counts), start[of], num_new[of], context[of]), axis=1)
    merges = np.stack((np.cumsum(counts) - counts, start, num_new, context), axis=1)
    return [items, np.array([len(items)]), merges]


def _on_device(arrays: list[_Integers], device: torch.device) -> list[torch.Tensor]:
    """All arrays as int32 in one copy, each at a multiple of 16 bytes as kernels assume."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    ends = np.cumsum(sizes)
    flat = np.zeros(int(ends[-1]), dtype=np.int32)
    for array, end, size in zip(arrays, ends.tolist(), sizes, strict=True):
        flat[end - size : end - size + array.size] = array.reshape(-1)
    moved = torch.from_numpy(flat)
    if device.type == "cuda":  # from pinned memory, or the host would wait for the device
        moved = moved.pin_memory().to(device, non_blocking=True)
    return [
        moved[end - size : end - size + array.size].view(array.shape)
        for array, end, size in zip(arrays, ends.tolist(), sizes, strict=True)
    ]


def _places(counts: Ints) -> Ints:
    """`[2, 3]` to `[0, 1, 0, 1, 2]`."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
