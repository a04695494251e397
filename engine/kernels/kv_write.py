"""Norm and rotation of queries and keys, and the writing of keys and values into the pool, in one pass.

Owns the kernel and its arguments. A program takes one token: its queries, which it changes in place, or its
keys and values, which it writes to the token's slot. With scales, a vector is stored as int8 or fp8 with a
scale of its own, its largest magnitude over the largest number of the type; see `PagedKV`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import inlined, kernel
from engine.kernels.paged_kv import PagedKV
from engine.kernels.shapes import shipped
from engine.kernels.tables import padded_head_dim


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What happens to queries and keys before they are used: RMS norm per head, then rotation; both optional.

    `cos` and `sin` are fp32 `[num_tokens, head_dim / 2]`, contiguous; dimension i is paired with
    i + head_dim / 2 (see `engine.model.rope`). `q_weight` and `k_weight` are the norms' `[head_dim]`.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0

    @property
    def changes_queries(self) -> bool:
        return self.cos is not None or self.q_weight is not None


@inlined
def _rotated(
    rows: tl.pointer_type,  # [BLOCK_H, 1], where each head begins
    is_in: tl.tensor,  # [BLOCK_H, BLOCK_D / 2]
    weight: tl.pointer_type,
    cos: tl.pointer_type,  # of this token
    sin: tl.pointer_type,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
) -> Any:
    """First and second half of each head, fp32."""
    dims = tl.arange(0, BLOCK_D // 2)
    is_dim = dims < HEAD_DIM // 2
    first = tl.load(rows + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(rows + HEAD_DIM // 2 + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        first *= factor * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        second *= (
            factor * tl.load(weight + HEAD_DIM // 2 + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        )
    if HAS_ROPE:
        c = tl.load(cos + dims, mask=is_dim, other=0.0)[None, :]
        s = tl.load(sin + dims, mask=is_dim, other=0.0)[None, :]
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    return first, second


@inlined
def _store(
    pool: tl.pointer_type,
    scales: tl.pointer_type,
    places: tl.tensor,  # [BLOCK_H], row of each head's slot
    first: tl.tensor,
    second: tl.tensor,
    is_in: tl.tensor,
    is_head: tl.tensor,
    LARGEST: tl.constexpr,  # of a quantized slot's type; 0 for floating point
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    if LARGEST > 0:
        peak = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        # A maximum passes over NaN; a product with 0 does not, and the scale will tell.
        scale = peak / LARGEST + tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
        tl.store(scales + places, scale, mask=is_head)
        inverse = (LARGEST / tl.maximum(peak, 1e-30))[:, None]
        first *= inverse
        second *= inverse
        if pool.dtype.element_ty == tl.int8:
            first = tl.floor(first + 0.5)
            second = tl.floor(second + 0.5)
    address = pool + places[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D // 2)[None, :]
    tl.store(address, first.to(pool.dtype.element_ty), mask=is_in)
    tl.store(address + HEAD_DIM // 2, second.to(pool.dtype.element_ty), mask=is_in)


@kernel()
def _kv_write(
    q: tl.pointer_type,  # [num_tokens, num_heads, head_dim]
    k: tl.pointer_type,  # [num_tokens, num_kv_heads, head_dim]
    v: tl.pointer_type,
    keys: tl.pointer_type,  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: tl.pointer_type,
    key_scales: tl.pointer_type,
    value_scales: tl.pointer_type,
    slots: tl.pointer_type,  # int64 [num_tokens]; negative: nothing is written
    cos: tl.pointer_type,
    sin: tl.pointer_type,
    q_weight: tl.pointer_type,
    k_weight: tl.pointer_type,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_dim = (tl.arange(0, BLOCK_D // 2) < HEAD_DIM // 2)[None, :]
    cos_row = cos + token * (HEAD_DIM // 2) if HAS_ROPE else cos
    sin_row = sin + token * (HEAD_DIM // 2) if HAS_ROPE else sin
    # No name is used in both branches: a tile of queries and one of keys differ in type.
    if tl.program_id(1) == 1:
        q_heads = tl.arange(0, BLOCK_Q)
        is_q = (q_heads < NUM_HEADS)[:, None] & is_dim
        q_rows = q + token * q_stride + q_heads[:, None] * HEAD_DIM
        q_first, q_second = _rotated(
            q_rows, is_q, q_weight, cos_row, sin_row, eps, HEAD_DIM, BLOCK_D, HAS_NORM, HAS_ROPE
        )
        address = q_rows + tl.arange(0, BLOCK_D // 2)[None, :]
        tl.store(address, q_first.to(q.dtype.element_ty), mask=is_q)
        tl.store(address + HEAD_DIM // 2, q_second.to(q.dtype.element_ty), mask=is_q)
    else:
        slot = tl.load(slots + token)
        heads = tl.arange(0, BLOCK_K)
        is_head = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        is_in = is_head[:, None] & is_dim
        places = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        first, second = _rotated(
            k + token * k_stride + heads[:, None] * HEAD_DIM, is_in, k_weight, cos_row, sin_row, eps,
            HEAD_DIM, BLOCK_D, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        _store(keys, key_scales, places, first, second, is_in, is_head, LARGEST, HEAD_DIM, BLOCK_D)
        first, second = _rotated(
            v + token * v_stride + heads[:, None] * HEAD_DIM, is_in, k_weight, cos_row, sin_row, eps,
            HEAD_DIM, BLOCK_D, False, False,
        )  # fmt: skip
        _store(values, value_scales, places, first, second, is_in, is_head, LARGEST, HEAD_DIM, BLOCK_D)


def kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    rotation: Rotation,
) -> None:
    """Norm and rotate `q` in place; norm, rotate and store `k`; store `v`. `k` and `v` stay as they are.

    `q [num_tokens, num_heads, head_dim]`, `k` and `v [num_tokens, num_kv_heads, head_dim]`: a token's heads
    are contiguous, tokens need not be. `slots` int64 `[num_tokens]`: `block_id * block_size + offset`, or
    negative for a token that has no place.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(1) == k.stride(1) == v.stride(1) == head_dim
    assert head_dim % 2 == 0
    _kv_write[(num_tokens, 2 if rotation.changes_queries else 1)](
        q,
        k,
        v,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        slots,
        rotation.cos,
        rotation.sin,
        rotation.q_weight,
        rotation.k_weight,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        rotation.eps,
        **_constants(num_heads, kv.num_kv_heads, head_dim, kv.block_size),
        HAS_NORM=rotation.q_weight is not None,
        HAS_ROPE=rotation.cos is not None,
        LARGEST=largest(kv.keys.dtype),
        **_options(),
    )


def largest(dtype: torch.dtype) -> float:
    """The largest number of a quantized slot's type; 0 for a type that needs no scale."""
    return {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}.get(dtype, 0.0)


def builds(arch: int) -> list[KernelBuild]:
    """What is launched on `arch`: see `engine.kernels.build`."""
    found = []
    for case in shipped(arch):
        if case.tiles.uses_tma or case.rule.window:
            continue  # neither changes how slots are written
        shape = case.shape
        num_heads = shape.num_kv_heads * shape.group
        has_norm = shape.head_dim == 128
        weights = ("q_weight", "k_weight")
        found.append(
            KernelBuild(
                name=f"kv_write {case.name}" + (", with norm" if has_norm else ""),
                kernel=_kv_write,
                signature={
                    **dict.fromkeys(("q", "k", "v"), f"*{case.dtype}"),
                    **case.slots_types(0),
                    "slots": "*i64",
                    **dict.fromkeys(("cos", "sin"), "*fp32"),
                    **(dict.fromkeys(weights, f"*{case.dtype}") if has_norm else {}),
                    **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
                    "eps": "fp32",
                },
                constexprs={
                    **case.absent,
                    **({} if has_norm else dict.fromkeys(weights)),
                    **_constants(num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size),
                    "HAS_NORM": has_norm,
                    "HAS_ROPE": True,
                    "LARGEST": largest(torch.int8) if shape.has_scales else 0.0,
                },
                options=_options(),
                aligned=frozenset(("q_stride", "k_stride", "v_stride")),
                is_sample=case.is_sample and arch == 90,
            )
        )
    return found


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_Q": 1 << (num_heads - 1).bit_length(),
        "BLOCK_K": 1 << (num_kv_heads - 1).bit_length(),
        "BLOCK_D": padded_head_dim(head_dim),
    }


def _options() -> dict[str, Any]:
    return {"num_warps": 4, "enable_fp_fusion": True}
