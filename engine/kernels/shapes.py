"""What prefill and decode attention share outside of their kernels: constants, arguments, shipped cases.

Owns the way from tensors and rules to a kernel's arguments, so that what `benchmarks/kernel_report.py`
compiles is what is launched. Any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.jit import is_interpreted
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.paged_softmax import attend
from engine.kernels.tables import AttentionTiles, attention_tiles, padded_head_dim

_SCALES = ("key_scales", "value_scales")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`group` query heads share a KV head; `dtype` is that of the queries, and of slots without scales."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    has_scales: bool = False


@dataclass(frozen=True, slots=True)
class ShippedCase:
    """A configuration that the attention kernels are compiled for ahead of time, to be reported."""

    name: str
    dtype: str  # as Triton names it
    shape: HeadShape
    rule: AttentionRule
    tiles: AttentionTiles
    is_sample: bool

    def slots_types(self, num_keys: int) -> dict[str, str]:
        """Triton's types of the arguments that hold keys and values, for tiles of `num_keys`."""
        slots = f"*{'i8' if self.shape.has_scales else self.dtype}"
        if self.tiles.uses_tma:
            slots = f"tensordesc<{slots[1:]}[{num_keys},{padded_head_dim(self.shape.head_dim)}]>"
        scales = dict.fromkeys(_SCALES, "*fp32") if self.shape.has_scales else {}
        return {"keys": slots, "values": slots, **scales}

    @property
    def absent(self) -> dict[str, None]:
        """Arguments that are None."""
        return {} if self.shape.has_scales else dict.fromkeys(_SCALES)


def shape_of(q: torch.Tensor, kv: PagedKV) -> HeadShape:
    return HeadShape(
        kv.num_kv_heads,
        q.shape[1] // kv.num_kv_heads,
        kv.head_dim,
        kv.block_size,
        q.dtype,
        kv.key_scales is not None,
    )


def shared_constants(shape: HeadShape, rule: AttentionRule, tiles: AttentionTiles) -> dict[str, Any]:
    return {
        "HAS_SCALES": shape.has_scales,
        "HAS_CAP": rule.soft_cap > 0,
        "HAS_WINDOW": rule.window > 0,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "BLOCK_SIZE": shape.block_size,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": padded_head_dim(shape.head_dim),
        "USE_TMA": tiles.uses_tma,
        "PRECISION": "tf32x3" if shape.dtype == torch.float32 else "ieee",
        "WIDENED": shape.dtype == torch.bfloat16 and is_interpreted(attend),
    }


def kernel_scale(rule: AttentionRule) -> float:
    """What a product is multiplied with: log2 is part of it, unless a soft cap comes in between."""
    return rule.scale if rule.soft_cap > 0 else rule.scale * math.log2(math.e)


def slots_arguments(kv: PagedKV, num_keys: int, uses_tma: bool) -> tuple[Any, Any]:
    """Keys and values for a kernel that takes `num_keys` of them at a time."""
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    if not uses_tma:
        return kv.keys, kv.values
    assert kv.block_size % num_keys == 0
    block = [num_keys, padded_head_dim(kv.head_dim)]
    keys, values = (pool.view(-1, kv.head_dim) for pool in (kv.keys, kv.values))
    return TensorDescriptor.from_tensor(keys, block), TensorDescriptor.from_tensor(values, block)


def shipped(arch: int) -> Iterator[ShippedCase]:
    """Eight KV heads, mostly of four query heads; small blocks, and those that the copy engine takes."""
    for name, dtype, shape, rule in _cases():
        slots = torch.int8 if shape.has_scales else shape.dtype
        tiles = attention_tiles(arch, shape.head_dim, slots, shape.block_size)
        if shape.block_size > 16 and not tiles.uses_tma:
            continue  # the kernel is that of small blocks
        is_sample = name == "bf16 128, blocks of 16" or (arch == 90 and name == "bf16 128, blocks of 128")
        yield ShippedCase(name, dtype, shape, rule, tiles, is_sample)


def _cases() -> Iterator[tuple[str, str, HeadShape, AttentionRule]]:
    for dtype, block_sizes in (("bf16", (16, 64, 128)), ("fp32", (16,))):
        for head_dim in (64, 80, 96, 128, 256):
            for block_size in block_sizes:
                shape = HeadShape(8, 4, head_dim, block_size, _DTYPES[dtype])
                name = f"{dtype} {head_dim}, blocks of {block_size}"
                yield name, dtype, shape, AttentionRule(head_dim**-0.5)
    for head_dim in (64, 128, 256):
        shape = HeadShape(8, 4, head_dim, 16, torch.bfloat16, has_scales=True)
        yield f"bf16 {head_dim}, int8 slots", "bf16", shape, AttentionRule(head_dim**-0.5)
    plain = HeadShape(8, 4, 128, 16, torch.bfloat16)
    rule = AttentionRule(128**-0.5, soft_cap=50.0, window=4096)
    yield "bf16 128, window and cap", "bf16", plain, rule
    for group in (1, 8):
        shape = HeadShape(8, group, 128, 16, torch.bfloat16)
        yield f"bf16 128, groups of {group}", "bf16", shape, AttentionRule(128**-0.5)
