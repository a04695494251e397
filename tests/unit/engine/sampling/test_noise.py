"""The noise as its definition says, its extremes and its evenness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampling.noise import key_tensor, log_exponential, row_key, row_keys, sample_key, token_hash

MASK = 0xFFFFFFFF
CPU = torch.device("cpu")

VECTOR_KEYS = [(0xE984CDE9, 0x3A7C8798), (0x09FA76C2, 0xBFB95BB0)]
VECTOR_HASHES = [[0x4E6764F3, 0xC76AB00E, 0xC409D323], [0x3CE76865, 0xD22464AE, 0xAD9CD9D6]]
VECTOR_LOG_EXPONENTIALS = [0.4954672, -1.1175601, -1.1746093]


def mix(x: int) -> int:
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK
    return x ^ (x >> 14)


def defined_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    keys = []
    for key in (0x243F6A88, 0x85A308D3):
        for word in (seed & MASK, (seed >> 32) & MASK, sample_index, position):
            key = mix(((key + 0x9E3779B9) & MASK) ^ word)
        keys.append(key)
    return keys[0], keys[1]


def defined_hash(token_id: int, key: tuple[int, int]) -> int:
    x = token_id ^ key[0]
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK
    x = (((x ^ (x >> 11)) * 0xAC4C1B51) + key[1]) & MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK
    return x ^ (x >> 14)


def defined_log_exponential(h: int) -> float:
    return math.log(-math.log1p(-((h ^ 0x80000000) + 0.5) / 2**32))


def unsigned(h: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return h.numpy().astype(np.int64) & MASK


def hashes(seed: int, sample_index: int, position: int, num: int) -> np.ndarray:  # type: ignore[type-arg]
    ids = torch.arange(num, dtype=torch.int32)[None, :]
    return unsigned(token_hash(ids, key_tensor([row_key(seed, sample_index, position)], CPU)))[0]


PLACES = [
    (0, 0, 0),
    (1, 0, 0),
    (-1, 0, 0),
    (2**63 - 1, 3, 77),
    (-(2**63), 1, 8191),
    (7, 2**20, 2**31 - 1),
]


@pytest.mark.parametrize("place", PLACES)
def test_the_tensors_do_what_the_definition_says(place: tuple[int, int, int]) -> None:
    key = defined_key(*place)
    assert row_key(*place) == key
    ids = [0, 1, 2, 31, 49151, 128255, 2**31 - 1]
    tensor = torch.tensor([ids], dtype=torch.int32)
    assert unsigned(token_hash(tensor, key_tensor([key], CPU)))[0].tolist() == [
        defined_hash(i, key) for i in ids
    ]
    found = log_exponential(tensor, key_tensor([key], CPU))[0].tolist()
    assert found == pytest.approx(
        [defined_log_exponential(defined_hash(i, key)) for i in ids], rel=1e-6, abs=1e-6
    )


def test_vectors_for_other_implementations() -> None:
    assert row_key(0, 0, 0) == VECTOR_KEYS[0]
    assert row_key(-5, 1, 2) == VECTOR_KEYS[1]
    ids = torch.tensor([[0, 1, 49151]], dtype=torch.int32)
    keys = key_tensor([row_key(0, 0, 0), row_key(-5, 1, 2)], CPU)
    assert unsigned(token_hash(ids, keys)).tolist() == VECTOR_HASHES
    assert log_exponential(ids, keys)[0].tolist() == pytest.approx(VECTOR_LOG_EXPONENTIALS, rel=1e-6)


def preimage(h: int, key: tuple[int, int]) -> int:
    """The 32-bit input whose hash is h: each step of the hash is a bijection."""

    def unshift(x: int, shift: int) -> int:
        y = x
        for _ in range(32 // shift + 1):
            y = x ^ (y >> shift)
        return y

    x = unshift(h, 14) * pow(0x31848BAB, -1, 2**32) & MASK
    x = (unshift(x, 15) - key[1]) * pow(0xAC4C1B51, -1, 2**32) & MASK
    x = unshift(x, 11) * pow(0xED5AD4BB, -1, 2**32) & MASK
    return unshift(x, 17) ^ key[0]


@pytest.mark.parametrize("h", [0, 1, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x7FFFFF80, 0x12345678])
def test_no_hash_makes_u_zero_or_one(h: int) -> None:
    key = row_key(3, 0, 5)
    word = preimage(h, key)
    signed = word - 2**32 if word >= 2**31 else word
    found = log_exponential(torch.tensor([[signed]], dtype=torch.int32), key_tensor([key], CPU)).item()
    assert math.isfinite(found)
    assert found == pytest.approx(defined_log_exponential(h), rel=1e-6)


def test_no_two_tokens_share_a_variate() -> None:
    assert len(set(hashes(1, 2, 3, 49152).tolist())) == 49152


@pytest.mark.parametrize("varied", ["token", "position", "seed", "sample", "high seed"])
def test_the_bits_are_even_along_each_coordinate(varied: str) -> None:
    num = 1 << 15
    if varied == "token":
        h = hashes(11, 0, 0, num)
    else:
        places = {
            "position": [(11, 0, i) for i in range(num)],
            "seed": [(i, 0, 4) for i in range(num)],
            "sample": [(11, i, 4) for i in range(num)],
            "high seed": [(i << 32, 0, 4) for i in range(num)],
        }[varied]
        ids = torch.full((1, 1), 260, dtype=torch.int32)
        h = unsigned(token_hash(ids, key_tensor([row_key(*place) for place in places], CPU)))[:, 0]
    for shift in (0, 12, 24):
        counts = np.bincount((h >> shift) & 0xFF, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3
    pairs = np.bincount(((h[:-1] >> 28) << 4) | (h[1:] >> 28), minlength=256)
    assert stats.chisquare(pairs).pvalue > 1e-3, "neighbours depend on each other"


def test_rows_are_not_correlated() -> None:
    base = hashes(5, 0, 9, 49152).astype(np.float64)
    for other in [(5, 0, 10), (5, 1, 9), (6, 0, 9), (5 + 2**32, 0, 9), (-5, 0, 9), (9, 0, 5), (5, 9, 0)]:
        assert abs(np.corrcoef(base, hashes(*other, 49152))[0, 1]) < 0.02


def test_log_exponentials_follow_their_distribution() -> None:
    ids = torch.arange(1 << 16, dtype=torch.int32)[None, :]
    variates = log_exponential(ids, key_tensor([row_key(2, 0, 0)], CPU)).double().exp()[0].numpy()
    assert stats.kstest(variates, "expon").pvalue > 1e-3


def test_keys_of_many_rows_are_those_of_each_row() -> None:
    samples = np.array([sample_key(seed, index) for seed, index, _ in PLACES], dtype=np.uint32)
    positions = np.array([position for _, _, position in PLACES])
    assert torch.equal(row_keys(samples, positions, CPU), key_tensor([row_key(*p) for p in PLACES], CPU))
