"""The pool of a GPU takes what weights and the largest step leave of a worker's share, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidConfig
from engine.config import EngineConfig
from engine.memory import DeviceMemory, num_fitting_blocks

_MEMORY = DeviceMemory(total=1000, free=700, weights=200, step=100)


def test_blocks_fill_the_share() -> None:
    assert num_fitting_blocks(_MEMORY, 0.9, 10) == 60  # 900 - 200 - 100
    assert num_fitting_blocks(_MEMORY, 0.5, 10) == 20


def test_what_others_have_taken_is_left_to_them() -> None:
    assert num_fitting_blocks(replace(_MEMORY, free=250), 0.9, 10) == 15


@given(
    st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6),
    st.floats(0.01, 1.0), st.integers(1, 1000),
)  # fmt: skip
def test_blocks_never_exceed_the_share_nor_what_is_free(
    total: int, free: int, weights: int, step: int, utilization: float, block_bytes: int
) -> None:
    memory = DeviceMemory(total, free, weights, step)
    try:
        num_blocks = num_fitting_blocks(memory, utilization, block_bytes)
    except InvalidConfig:
        num_blocks = 0
    taken = num_blocks * block_bytes
    assert num_blocks == 0 or (taken + weights + step <= total * utilization and taken + step <= free)
    # and one more would be too much
    more = taken + block_bytes
    assert more + weights + step > int(total * utilization) or more + step > free


def test_when_nothing_fits_the_sizes_are_told() -> None:
    gib = 1 << 30
    with pytest.raises(InvalidConfig, match=r"90% of 8\.00 GiB.* 7\.00 GiB.* 1\.00 GiB.* 0\.50 GiB"):
        num_fitting_blocks(DeviceMemory(8 * gib, gib // 2, 7 * gib, gib), 0.9, 1 << 20)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_an_impossible_share_is_refused_by_name(share: float) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)
