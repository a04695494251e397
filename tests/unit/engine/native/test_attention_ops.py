"""Native attention equals its twin over pages in any order; a token's result depends on its sequence."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.native.operators import NativeOps
from engine.native.plan import AttentionPlan, plan_attention
from engine.native.reference import ReferenceOps

_NUM_BLOCKS = 400


class Pages:
    """One layer's pool, NaN where nothing was written, and the work of a step over it."""

    def __init__(self, lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int):
        generator = torch.Generator().manual_seed(len(lengths))
        self.num_heads, self.block_size = num_heads, block_size
        shape = (_NUM_BLOCKS, num_kv_heads, block_size, head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        free = list(range(_NUM_BLOCKS))
        random.Random(0).shuffle(free)
        self.tables = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
        self.lengths = lengths
        self.q = [torch.randn(length, num_heads, head_dim, generator=generator) for length in lengths]
        for table, length in zip(self.tables, lengths, strict=True):
            for slot in range(length):
                block, offset = table[slot // block_size], slot % block_size
                for pool in (self.keys, self.values):
                    pool[block, :, offset] = torch.randn(num_kv_heads, head_dim, generator=generator)

    def step(self, work: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionPlan]:
        """The last so many tokens of these sequences: queries and plan."""
        num_new = np.array([count for _, count in work])
        lengths = np.array([self.lengths[index] for index, _ in work])
        width = max(len(self.tables[index]) for index, _ in work)
        tables = np.array(
            [[*self.tables[i], *[self.tables[i][0]] * (width - len(self.tables[i]))] for i, _ in work]
        )
        batch = Batch(
            order=np.arange(len(work)),
            num_new=num_new,
            num_context=lengths - num_new,
            starts=np.cumsum(num_new) - num_new,
            block_tables=tables,
            token_ids=torch.empty(0),
            positions=torch.empty(0),
            token_blocks=np.empty(0, dtype=np.int64),
            token_offsets=np.empty(0, dtype=np.int64),
        )
        q = torch.cat([self.q[index][self.lengths[index] - count :] for index, count in work])
        return q, plan_attention(batch, self.num_heads // self.keys.shape[1])


_SHAPES = [(9, 3, 64, 16), (4, 2, 16, 4), (8, 1, 128, 16), (2, 2, 32, 64), (4, 4, 96, 7), (3, 1, 256, 16)]


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_attention_equals_the_twin(ops: NativeOps, shape: tuple[int, int, int, int]) -> None:
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 513]
    pages = Pages(lengths if shape[3] > 4 else lengths[:-4], *shape)
    last = len(pages.lengths) - 1
    for work in (
        [(i, 1) for i in range(last + 1)],
        [(i, min(length, 8)) for i, length in enumerate(pages.lengths)],
        [(last, pages.lengths[last]), (3, 16), (5, 1)],
        [(last, 100), (4, 17)],
    ):
        q, plan = pages.step(work)
        actual = ops.attention(q, pages.keys, pages.values, plan)
        expected = ReferenceOps().attention(q, pages.keys, torch.nan_to_num(pages.values), plan)
        assert not expected.isnan().any()
        assert float((actual - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("shape", _SHAPES[:2], ids=str)
def test_a_token_is_the_same_bits_in_a_chunk_a_decode_and_any_company(
    ops: NativeOps, shape: tuple[int, int, int, int]
) -> None:
    pages = Pages([520, 300, 40, 270], *shape)
    q, plan = pages.step([(0, 520)])
    whole = ops.attention(q, pages.keys, pages.values, plan)
    for work in (
        [(0, 1)],
        [(0, 5), (1, 1)],
        [(1, 300), (0, 33), (3, 2)],
        [(2, 40), (3, 3), (0, 200), (1, 9)],
    ):
        q, plan = pages.step(work)
        mixed = ops.attention(q, pages.keys, pages.values, plan)
        place = [index for index, _ in work].index(0)
        start, count = sum(count for _, count in work[:place]), work[place][1]
        assert torch.equal(mixed[start : start + count], whole[520 - count :])


def test_the_number_of_threads_changes_no_bit(ops: NativeOps) -> None:
    pages = Pages([600, 90], *_SHAPES[0])
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            for work in ([(0, 1), (1, 1)], [(0, 600)]):
                q, plan = pages.step(work)
                results.append(ops.attention(q, pages.keys, pages.values, plan))
    finally:
        torch.set_num_threads(before)
    for decode, prefill in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(decode, results[0])
        assert torch.equal(prefill, results[1])


def test_large_scores_do_not_overflow(ops: NativeOps) -> None:
    pages = Pages([200], *_SHAPES[0])
    q, plan = pages.step([(0, 200)])
    actual = ops.attention(q * 300, pages.keys, pages.values, plan)
    expected = ReferenceOps().attention(q * 300, pages.keys, torch.nan_to_num(pages.values), plan)
    assert float((actual - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("which", ["q", "keys", "values"])
def test_what_is_not_finite_stays_visible(ops: NativeOps, which: str) -> None:
    pages = Pages([40], *_SHAPES[0])
    q, plan = pages.step([(0, 1)])
    if which == "q":
        q[0] = torch.nan
    else:
        pool = pages.keys if which == "keys" else pages.values
        pool[pages.tables[0][1], :, 3] = torch.nan
    assert ops.attention(q, pages.keys, pages.values, plan).isnan().any()


def test_splits_and_tiles_cover_each_query_once() -> None:
    pages = Pages([600, 300, 80, 5], *_SHAPES[0])
    _, plan = pages.step([(0, 600), (1, 1), (2, 30), (3, 2)])
    seen = []
    for sequence, token, count, _, split, _ in plan.items.tolist():
        if split <= 0:
            seen += range(token, token + count)
        assert (split >= 0) == (sequence == 1)
    assert sorted(seen) == list(range(633))
    assert plan.groups.tolist() == [[25, 2]]


@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (8, 1, 64, 16), (3, 1, 32, 7)], ids=str)
def test_a_share_of_many_sequences_gives_the_bits_of_each_alone(
    ops: NativeOps, shape: tuple[int, int, int, int]
) -> None:
    """Threads take several pieces in turn, which end anywhere in a block, a tile and a split."""
    lengths = [1, 15, 16, 17, 63, 64, 65, 129, 255, 256, 257, 320, 321, 48, 511, 31]
    pages = Pages(lengths, *shape)
    q, plan = pages.step([(i, 1) for i in range(len(lengths))])
    together = ops.attention(q, pages.keys, pages.values, plan)
    assert not together.isnan().any()
    for index, length in enumerate(lengths):
        q, plan = pages.step([(index, 1)])
        alone = ops.attention(q, pages.keys, pages.values, plan)
        assert torch.equal(together[index], alone[0])
        q, plan = pages.step([(index, length)])
        assert torch.equal(ops.attention(q, pages.keys, pages.values, plan)[-1], alone[0])


def test_what_fills_a_table_behind_its_blocks_is_not_read(ops: NativeOps) -> None:
    """The filling names a block far outside of the pool: to read it would end the process."""
    pages = Pages([130, 64], *_SHAPES[0])
    q, plan = pages.step([(0, 1), (1, 1)])
    expected = ops.attention(q, pages.keys, pages.values, plan)
    num_used = [len(table) for table in pages.tables]
    for row, used in zip(plan.tables, num_used, strict=True):
        row[used:] = 1 << 40
    assert torch.equal(ops.attention(q, pages.keys, pages.values, plan), expected)
