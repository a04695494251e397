"""Tile sizes of the attention kernels, by architecture and head size.

Owns the choice: nothing is tuned when a service starts, so a start takes no longer and two workers of one
kind compute the same bits. The numbers come from what the compiler makes of them
(`benchmarks/kernel_report.py`): no spills up to head size 128, and as many keys in flight as shared memory
holds. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

INTERPRETER = 0
"""In place of an architecture: tiles for Triton's interpreter, where a few large operations are quickest."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """`rows` (tokens times query heads of a KV head) against `keys` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """At most `rows` of one sequence against `keys` at a time, `split` keys in one program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    split: int = 256


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """With `uses_tma`, a tile of keys is one block or part of one, and the copy engine fetches it."""

    prefill: PrefillTile
    decode: DecodeTile
    uses_tma: bool = False


def attention_tiles(arch: int, head_dim: int, dtype: torch.dtype, block_size: int) -> AttentionTiles:
    """Tiles for `arch` (80, 90, 100 or `INTERPRETER`), slots of `dtype` and blocks of `block_size` tokens."""
    width = max(64, padded_head_dim(head_dim))
    if arch == INTERPRETER:
        return _INTERPRETED
    if dtype.itemsize != 2:
        return (_FP32 if dtype == torch.float32 else _NARROW)[(arch, width)]
    for tiles in _TMA.get((arch, width), ()):
        if block_size % max(tiles.prefill.keys, tiles.decode.keys) == 0:
            return tiles
    return _PAGED[(arch, width)]


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a head is padded to inside a kernel."""
    width = max(16, 1 << (head_dim - 1).bit_length())
    assert width <= 256, f"head size {head_dim} is more than 256"
    return width


def architecture(device: torch.device) -> int:
    """The column of the tables for `device`."""
    if device.type == "cpu":
        return INTERPRETER
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)  # consumer Blackwell has Ampere's kind of tensor core


def _tiles(prefill: tuple[int, int, int, int], decode: tuple[int, int, int, int]) -> AttentionTiles:
    return AttentionTiles(PrefillTile(*prefill), DecodeTile(*decode))


def _tma(prefill: tuple[int, int, int, int], decode: tuple[int, int, int, int]) -> AttentionTiles:
    return AttentionTiles(PrefillTile(*prefill), DecodeTile(*decode), uses_tma=True)


# rows, keys, warps, stages
_PAGED: Mapping[tuple[int, int], AttentionTiles] = MappingProxyType(
    {
        (80, 64): _tiles((128, 128, 8, 3), (64, 64, 4, 3)),
        (80, 128): _tiles((128, 32, 8, 3), (64, 64, 4, 3)),
        (80, 256): _tiles((64, 32, 8, 2), (64, 32, 8, 3)),
        (90, 64): _tiles((128, 128, 8, 3), (64, 64, 4, 4)),
        (90, 128): _tiles((128, 64, 8, 3), (64, 64, 4, 3)),
        (90, 256): _tiles((128, 32, 8, 3), (64, 32, 8, 3)),
        (100, 64): _tiles((128, 128, 8, 3), (64, 64, 4, 4)),
        (100, 128): _tiles((128, 64, 8, 3), (64, 64, 4, 3)),
        (100, 256): _tiles((128, 32, 8, 3), (64, 32, 8, 3)),
    }
)
"""16-bit keys in blocks of any size."""

_TMA: Mapping[tuple[int, int], tuple[AttentionTiles, ...]] = MappingProxyType(
    {
        (90, 64): (_tma((128, 128, 8, 3), (64, 64, 4, 4)), _tma((128, 64, 8, 4), (64, 64, 4, 4))),
        (90, 128): (_tma((128, 128, 8, 2), (64, 64, 4, 3)), _tma((128, 64, 8, 3), (64, 64, 4, 3))),
        (90, 256): (_tma((128, 64, 8, 2), (64, 32, 8, 3)),),
        (100, 64): (_tma((128, 128, 8, 3), (64, 64, 4, 4)), _tma((128, 64, 8, 2), (64, 64, 4, 4))),
        (100, 128): (_tma((128, 128, 8, 2), (64, 64, 4, 3)), _tma((128, 64, 8, 3), (64, 64, 4, 3))),
        (100, 256): (_tma((128, 32, 8, 3), (64, 32, 8, 3)),),
    }
)
"""16-bit keys in blocks that are multiples of a tile's keys: the largest tile first."""

_NARROW: Mapping[tuple[int, int], AttentionTiles] = MappingProxyType(
    {
        (80, 64): _tiles((128, 32, 8, 3), (64, 64, 8, 3)),
        (80, 128): _tiles((128, 32, 8, 3), (64, 64, 8, 3)),
        (80, 256): _tiles((64, 32, 8, 2), (64, 32, 8, 3)),
        (90, 64): _tiles((128, 64, 8, 3), (64, 64, 8, 3)),
        (90, 128): _tiles((128, 64, 8, 3), (64, 64, 8, 3)),
        (90, 256): _tiles((128, 32, 8, 3), (64, 32, 8, 3)),
        (100, 64): _tiles((128, 64, 8, 3), (64, 64, 8, 3)),
        (100, 128): _tiles((128, 64, 8, 3), (64, 64, 8, 3)),
        (100, 256): _tiles((128, 32, 8, 3), (64, 32, 8, 3)),
    }
)
"""8-bit slots, which take registers to be widened."""

_FP32: Mapping[tuple[int, int], AttentionTiles] = MappingProxyType(
    {
        (80, 64): _tiles((32, 32, 4, 3), (32, 32, 4, 3)),
        (80, 128): _tiles((32, 32, 4, 2), (32, 32, 4, 3)),
        (80, 256): _tiles((32, 32, 8, 2), (16, 32, 8, 2)),
        (90, 64): _tiles((64, 32, 4, 2), (32, 32, 4, 3)),
        (90, 128): _tiles((64, 16, 4, 2), (32, 32, 4, 3)),
        (90, 256): _tiles((32, 32, 8, 2), (16, 32, 8, 2)),
        (100, 64): _tiles((32, 32, 4, 3), (32, 32, 4, 3)),
        (100, 128): _tiles((32, 16, 4, 3), (32, 32, 4, 3)),
        (100, 256): _tiles((32, 32, 8, 2), (16, 32, 8, 2)),
    }
)
"""Products in three TF32 parts: as exact as fp32, at a fraction of 16 bits' speed."""

_INTERPRETED = _tiles((64, 64, 1, 1), (64, 64, 1, 1))
