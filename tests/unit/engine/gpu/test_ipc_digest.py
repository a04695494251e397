"""The digest by which both ends of a copy between devices compare: what it tells apart, that it is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu.ipc_digest import device_digest

MASK = 2**64 - 1
SEEDS = st.integers(0, MASK)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def by_hand(data: bytes, seed: int) -> int:
    golden, total = 0x9E3779B97F4A7C15, 0
    start = mixed((seed + len(data) * golden) & MASK)
    for index in range(0, len(data), 8):
        word = int.from_bytes(data[index : index + 8], "little")
        total += mixed(((index // 8 + 1) * golden + start ^ word) & MASK)
    return total & MASK


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200), seed=SEEDS)
def test_it_is_what_its_definition_says(data: bytes, seed: int) -> None:
    assert device_digest(tensor_of(data), seed) == by_hand(data, seed)


@settings(deadline=None, max_examples=100)
@given(data=st.binary(min_size=1, max_size=64), seed=SEEDS)
def test_each_single_bit_counts(data: bytes, seed: int) -> None:
    whole = device_digest(tensor_of(data), seed)
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        assert device_digest(tensor_of(bytes(flipped)), seed) != whole


def test_order_length_and_seed_count() -> None:
    first, second = bytes(range(8)), bytes(range(100, 108))
    found = {
        device_digest(tensor_of(data), seed)
        for data, seed in (
            (first + second, 1),
            (second + first, 1),
            (first + second, 2),
            (first + second + bytes(8), 1),
            (first + second + bytes(3), 1),
            (bytes(16), 1),
            (bytes(17), 1),
        )
    }
    assert len(found) == 7


def test_words_and_neighbours_that_swap_are_seen_in_a_large_payload() -> None:
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    whole, words = device_digest(data, 9), data.view(torch.int64)
    for shift in (1, 2, 1000, 65536):
        assert device_digest(words.roll(shift).view(torch.uint8), 9) != whole
    assert device_digest(data.clone(), 9) == whole


def test_only_bytes_are_summed() -> None:
    with pytest.raises(AssertionError):
        device_digest(torch.zeros(4), 1)
