"""A 64-bit digest of bytes that are on a device, of any device the same.

Each aligned word of eight bytes is combined with a key of its position and the seed, mixed by steps that can
all be undone (odd multiplications, shifted exclusive ors, as in the finalizer of SplitMix64: Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", 2014), and summed modulo 2⁶⁴. The sum does not depend
on the order in which a device adds. A change within one word always changes it, since that word's term
changes; any other change is missed with a chance of 2⁻⁶⁴. It finds damage; it withstands no forger, nor did
the checksum in whose place it stands. Pure; on the current stream of the calling thread.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def device_digest(data: torch.Tensor, seed: int) -> int:
    """Of `data`, uint8 and contiguous; `seed` has 64 bits. Waits for the device."""
    assert data.dtype == torch.uint8
    num_bytes = data.numel()
    flat = data.reshape(-1)
    if num_bytes % 8:
        flat = torch.nn.functional.pad(flat, (0, -num_bytes % 8))
    words = flat.view(torch.int64)
    # the length is part of the seed: a padded end is not the same as zeros
    start = _signed(_scramble((seed + num_bytes * _GOLDEN) & _MASK))
    mixed = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=data.device)
    mixed.mul_(_signed(_GOLDEN)).add_(start).bitwise_xor_(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
    mixed.bitwise_xor_(_shifted(mixed, 31))
    return int(mixed.sum().item()) & _MASK


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's own shift of signed words copies the sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _scramble(value: int) -> int:
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
