"""Counter-based noise: an exponential variate for each (seed, sample index, position, token id).

The whole definition, in unsigned 32-bit arithmetic (`>>` is logical), so that any kernel can repeat it:

    mix(x):  x ^= x >> 17;  x *= ED5AD4BB;  x ^= x >> 11;  x *= AC4C1B51;  x ^= x >> 15;  x *= 31848BAB;  x ^=
    x >> 14 key(c):  k = c;  for w in (seed low word, seed high word, sample index, position):  k = mix((k +
    9E3779B9) ^ w) k0, k1 = key(243F6A88), key(85A308D3) h:       the steps of mix on (token id ^ k0), with k1
    added after the second multiplication u      = ((h ^ 80000000) + 1/2) / 2^32          in float64, exact,
    never 0 or 1 E      = -log1p(-u),  log E                     in float64, then rounded to float32

A negative seed counts as its two's complement of 64 bits. For one key, h is a permutation of the token ids,
so no two tokens share a variate. Source of the multipliers and shifts: C. Wellons' search for low-bias
integer hashes ("triple32"); k0 and k1 start from digits of pi.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_SHIFTS = (17, 11, 15, 14)
_STEP = 0x9E3779B9
_STARTS = (0x243F6A88, 0x85A308D3)


def row_key(seed: int, sample_index: int, position: int) -> tuple[int, int]:
    """(k0, k1) of one row, unsigned 32-bit."""
    k0, k1 = sample_key(seed, sample_index)
    return _absorb(k0, position), _absorb(k1, position)


def sample_key(seed: int, sample_index: int) -> tuple[int, int]:
    """The part of a row's key that is the same for all tokens of a sample."""
    k0, k1 = _STARTS
    for word in (seed, seed >> 32, sample_index):
        k0, k1 = _absorb(k0, word), _absorb(k1, word)
    return k0, k1


def row_keys(
    sample_keys: NDArray[np.uint32], positions: NDArray[np.int64], device: torch.device
) -> torch.Tensor:
    """Row keys from those of their samples (`[num_rows, 2]`), as they are used on a device: int32
    `[num_rows, 2]`.
    """
    x = (sample_keys + np.uint32(_STEP)) ^ positions.astype(np.uint32)[:, None]  # wraps modulo 2^32
    for shift, multiplier in zip(_SHIFTS[:3], _MULTIPLIERS, strict=True):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(multiplier)
    x ^= x >> np.uint32(_SHIFTS[3])
    return torch.from_numpy(x.view(np.int32)).to(device)


def key_tensor(keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Row keys as they are used on a device: int32 `[num_rows, 2]`."""
    return torch.tensor([[_signed(k0), _signed(k1)] for k0, k1 in keys], dtype=torch.int32, device=device)


def token_hash(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """h for int32 token ids `[num_rows or 1, m]` and keys `[num_rows, 2]`: int32 `[num_rows, m]`, the bits of
    h.
    """
    h = token_ids ^ keys[:, 0:1]
    _xor_shifted(h, _SHIFTS[0])
    h.mul_(_signed(_MULTIPLIERS[0]))  # wraps modulo 2^32, as two's complement does
    _xor_shifted(h, _SHIFTS[1])
    h.mul_(_signed(_MULTIPLIERS[1])).add_(keys[:, 1:2])
    _xor_shifted(h, _SHIFTS[2])
    h.mul_(_signed(_MULTIPLIERS[2]))
    _xor_shifted(h, _SHIFTS[3])
    return h


def log_exponential(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """log E for int32 token ids `[num_rows or 1, m]` and keys `[num_rows, 2]`: float32 `[num_rows, m]`,
    finite.
    """
    # read as a signed number, the bits of h are (h ^ 80000000) - 2^31
    u = token_hash(token_ids, keys).to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32)
    return u.neg_().log1p_().neg_().log_().to(torch.float32)


def _absorb(key: int, word: int) -> int:
    return _mix(((key + _STEP) & _MASK) ^ (word & _MASK))


def _mix(x: int) -> int:
    for shift, multiplier in zip(_SHIFTS[:3], _MULTIPLIERS, strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK
    return x ^ (x >> _SHIFTS[3])


def _xor_shifted(h: torch.Tensor, shift: int) -> None:
    """h ^= h >> shift, logically: torch shifts int32 arithmetically, so the copies of the sign are masked
    away.
    """
    h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
