"""Blocks of one size as blocks of another: each token's bytes are where they belong, whatever comes when."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kv_layout import KVLayout
from kv_transfer.reblocking import Reblocking, reblocked
from tests.unit.kv_transfer.doubles import ByteStore, quick

LAYOUT = KVLayout(model="toy", num_layers=2, num_kv_heads=2, head_dim=2, block_size=4, dtype="float16")


def tokens_of(payload: memoryview | bytes, layout: KVLayout) -> np.ndarray:
    """`[num_tokens, ...]`: what belongs to each token slot, in order."""
    blocks = np.frombuffer(payload, np.uint8).reshape(-1, *layout.block_shape[:-1], layout.head_dim * 2)
    return np.moveaxis(blocks, 4, 1).reshape(-1, *layout.block_shape[:3], layout.head_dim * 2)


@quick
@given(
    sizes=st.sampled_from([(4, 8), (8, 4), (4, 4), (2, 12), (12, 2), (1, 4), (4, 1)]),
    num_tokens=st.integers(1, 50),
    seed=st.integers(0, 1 << 16),
)
def test_each_token_is_in_its_slot_and_each_block_is_told_once_when_all_of_it_is_there(
    sizes: tuple[int, int], num_tokens: int, seed: int
) -> None:
    own, wanted = (replace(LAYOUT, block_size=size) for size in sizes)
    chance, store = random.Random(seed), ByteStore(64, own, seed=seed)
    blocks = Reblocking(store, wanted, num_tokens)
    num_own, table = own.num_blocks(num_tokens), chance.sample(range(64), own.num_blocks(num_tokens))
    told: list[int] = []
    first = 0
    while first < num_own:
        end = chance.randint(first + 1, num_own)
        told += blocks.add(first, table[first:end])
        num_there = min(end * own.block_size, num_tokens)
        num_complete = wanted.num_blocks(num_tokens) if end == num_own else num_there // wanted.block_size
        assert told == list(range(num_complete))
        first = end
    found = tokens_of(blocks.read_blocks(told), wanted)[:num_tokens]
    expected = tokens_of(store.read_blocks(table), own)[:num_tokens]
    assert (found == expected).all()
    assert blocks.read_blocks(told) == blocks.read_blocks(told), "a second try sends the same"


@pytest.mark.parametrize("size", [1, 2, 8, 12])
def test_whole_blocks_are_merged_or_split(size: int) -> None:
    assert reblocked(LAYOUT, size) == replace(LAYOUT, block_size=size)


@pytest.mark.parametrize("size", [3, 6, 10])
def test_sizes_of_which_neither_is_a_multiple_are_no_blocks_of_each_other(size: int) -> None:
    assert reblocked(LAYOUT, size) is None


def test_another_shape_is_never_the_same_block_in_another_size() -> None:
    assert not LAYOUT.can_become(replace(LAYOUT, block_size=8, head_dim=4))
    assert not LAYOUT.can_become(replace(LAYOUT, model="other"))
