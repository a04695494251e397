"""Sequences whose keys and values lie in shuffled blocks, NaN wherever nothing was written."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch, Ints
from engine.kernels import reference
from engine.kernels.decode_attention import decode_attention
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.tables import AttentionTiles, DecodeTile, PrefillTile
from engine.kernels.work import StepWork, plan_work

SMALL = AttentionTiles(PrefillTile(16, 16, 4, 1), DecodeTile(16, 16, 4, 1, split=32))
"""Tiles so small that short sequences have many of them."""


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self.head_dim**-0.5)


class Pages:
    """One layer's pool with `lengths[i]` written tokens of sequence i, and queries for all of them.

    A sequence's content depends on its place in `lengths` only. Blocks that no sequence owns are NaN, and so
    are the slots behind a sequence's last one.
    """

    def __init__(self, lengths: list[int], heads: Heads, device: torch.device, spread: float = 1.0) -> None:
        self.heads, self.lengths, self.device = heads, lengths, device
        size = heads.block_size
        counts = [-(-length // size) for length in lengths]
        ids = list(range(1, sum(counts) + 4))  # block 0 belongs to nobody: what a careless 0 would read
        random.Random(len(lengths)).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (2, sum(counts) + 4, heads.num_kv_heads, size, heads.head_dim)
        pool = torch.full(shape, torch.nan)
        self.q = []
        for index, (table, length) in enumerate(zip(self.tables, lengths, strict=True)):
            generator = torch.Generator().manual_seed(index)
            draw = torch.randn(
                length, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, generator=generator
            )
            q, kv = draw[:, : heads.num_heads], draw[:, heads.num_heads :]
            k, v = kv[:, : heads.num_kv_heads], kv[:, heads.num_kv_heads :]
            self.q.append((q * spread).to(heads.dtype))
            places = torch.arange(length)
            blocks = torch.tensor(table, dtype=torch.int64)[places // size]
            pool[0, blocks, :, places % size] = k * spread
            pool[1, blocks, :, places % size] = v * spread
        self.pool = pool.to(heads.dtype).to(device)

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.pool[0], self.pool[1])

    def batch(self, new: list[tuple[int, int]]) -> Batch:
        """The last so many tokens of these sequences, in this order."""
        num_new = np.array([count for _, count in new])
        lengths = np.array([self.lengths[index] for index, _ in new])
        starts = np.cumsum(num_new) - num_new
        rows = np.repeat(np.arange(len(new)), num_new)
        positions = np.arange(num_new.sum()) - starts[rows] + (lengths - num_new)[rows]
        tables = self._padded([self.tables[index] for index, _ in new])
        return Batch(
            order=np.arange(len(new)),
            num_new=num_new,
            num_context=lengths - num_new,
            starts=starts,
            block_tables=tables,
            token_ids=torch.empty(0),
            positions=torch.from_numpy(positions),
            token_blocks=tables[rows, positions // self.heads.block_size],
            token_offsets=positions % self.heads.block_size,
        )

    def queries(self, new: list[tuple[int, int]]) -> torch.Tensor:
        ends = [self.lengths[index] for index, _ in new]
        parts = [self.q[index][end - count : end] for (index, count), end in zip(new, ends, strict=True)]
        return torch.cat(parts).to(self.device)

    def work(self, new: list[tuple[int, int]], tiles: AttentionTiles) -> StepWork:
        group = self.heads.num_heads // self.heads.num_kv_heads
        size = self.heads.block_size
        return plan_work(self.batch(new), tiles.prefill.rows // group, tiles.decode.split, size, self.device)

    def run(
        self,
        new: list[tuple[int, int]],
        tiles: AttentionTiles,
        rule: AttentionRule,
        twin: bool = False,
        kv: PagedKV | None = None,
    ) -> torch.Tensor:
        """The kernels' result for `new`, or their twins'; NaN where they wrote nothing."""
        prefill = reference.prefill_attention if twin else prefill_attention
        decode = reference.decode_attention if twin else decode_attention
        q, work, kv = self.queries(new), self.work(new, tiles), kv or self.kv
        out = torch.full_like(q, torch.nan)
        if work.prefill is not None:
            prefill(q, kv, out, work.prefill, rule, tiles)
        for part in work.decodes:
            decode(q, kv, out, part, rule, tiles)
        return out

    @staticmethod
    def _padded(tables: list[list[int]]) -> Ints:
        width = max(len(table) for table in tables)
        return np.array([[*table, *[table[0]] * (width - len(table))] for table in tables])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float | None = None) -> None:
    """Equal up to rounding, relative to the largest value."""
    assert not expected.isnan().any()
    assert not actual.isnan().any()
    limit = bound or (1e-5 if actual.dtype == torch.float32 else 1e-2)
    difference = (actual.double() - expected.double()).abs().max()
    assert float(difference) <= limit * float(expected.double().abs().max())
