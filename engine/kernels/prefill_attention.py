"""Attention of many new tokens per sequence over the paged KV pool, causal.

Owns the kernel for chunks of prompts; their keys and values are already written. A tile is some tokens of one
sequence times the query heads that share a KV head, so that each key is read once for all of them. Keys are
taken from the first on, in steps of `BLOCK_N`: a row's result depends on its own sequence only, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.paged_softmax import attend
from engine.kernels.shapes import (
    HeadShape,
    kernel_scale,
    shape_of,
    shared_constants,
    shipped,
    slots_arguments,
)
from engine.kernels.tables import AttentionTiles
from engine.kernels.work import PrefillWork


@kernel(varying=("table_stride", "num_tiles"))
def _prefill_attention(
    q: tl.pointer_type,  # [num_tokens, num_heads, head_dim]
    keys: tl.pointer_type,  # [num_blocks, num_kv_heads, block_size, head_dim], or a descriptor of it
    values: tl.pointer_type,
    key_scales: tl.pointer_type,  # fp32 [num_blocks, num_kv_heads, block_size], if there are any
    value_scales: tl.pointer_type,
    out: tl.pointer_type,  # [num_tokens, num_heads, head_dim]
    tiles: tl.pointer_type,  # int32 [num_tiles, 5], see PrefillWork
    tables: tl.pointer_type,  # int32 [num_sequences, table_stride]
    num_tiles: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,  # elements from token to token
    out_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
) -> None:
    # Tiles of one head are neighbours and share its keys in the cache; the longest come first.
    kv_head = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    sequence = tl.load(tiles + 5 * tile)
    first = tl.load(tiles + 5 * tile + 1)
    start = tl.load(tiles + 5 * tile + 2).to(tl.int64)
    num_new = tl.load(tiles + 5 * tile + 3)
    context = tl.load(tiles + 5 * tile + 4)
    table = tables + sequence.to(tl.int64) * table_stride

    count = tl.minimum(num_new - first, BLOCK_M // GROUP)  # tokens here
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = tl.minimum(rows // GROUP, count - 1)  # rows beyond the last token repeat it
    heads = kv_head * GROUP + rows % GROUP
    positions = context + first + tokens
    is_dim = (dims < HEAD_DIM)[None, :]
    q_rows = q + (start + first) * q_stride + tokens * q_stride + heads * HEAD_DIM
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=is_dim, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    last = context + first + count  # keys that some row sees
    low = 0
    shared = (context + first + 1) // BLOCK_N * BLOCK_N  # keys that all rows see, in whole tiles
    if HAS_WINDOW:
        low = tl.maximum(context + first + 1 - window, 0)
        shared = low // BLOCK_N * BLOCK_N
    else:
        acc, top, total = attend(
            acc, top, total, q_tile, positions, keys, values, key_scales, value_scales, table, kv_head,
            0, shared, 0, scale, soft_cap, window, False, HAS_SCALES, HAS_CAP, HAS_WINDOW, NUM_KV_HEADS,
            BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, WIDENED,
        )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, q_tile, positions, keys, values, key_scales, value_scales, table, kv_head,
        shared, last, low, scale, soft_cap, window, True, HAS_SCALES, HAS_CAP, HAS_WINDOW, NUM_KV_HEADS,
        BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, USE_TMA, PRECISION, WIDENED,
    )  # fmt: skip

    out_rows = out + (start + first) * out_stride + tokens * out_stride + heads * HEAD_DIM
    is_stored = (rows < count * GROUP)[:, None] & is_dim
    result = acc / total[:, None]
    tl.store(out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_stored)


def prefill_attention(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    work: PrefillWork,
    rule: AttentionRule,
    tiles: AttentionTiles,
) -> None:
    """Attend with the rows of `q` that `work` names and write the same rows of `out`.

    `q` and `out` are `[num_tokens, num_heads, head_dim]`; a token's heads are contiguous.
    """
    assert q.stride(1) == out.stride(1) == kv.head_dim
    keys, values = slots_arguments(kv, tiles.prefill.keys, tiles.uses_tma)
    num_tiles = len(work.tiles)
    _prefill_attention[(num_tiles * kv.num_kv_heads,)](
        q,
        keys,
        values,
        kv.key_scales,
        kv.value_scales,
        out,
        work.tiles,
        work.tables,
        num_tiles,
        work.tables.stride(0),
        q.stride(0),
        out.stride(0),
        kernel_scale(rule),
        rule.soft_cap,
        rule.window,
        **_constants(shape_of(q, kv), rule, tiles),
        **_options(tiles),
    )


def builds(arch: int) -> list[KernelBuild]:
    """What is launched on `arch`: see `engine.kernels.build`."""
    found = []
    for case in shipped(arch):
        found.append(
            KernelBuild(
                name=f"prefill_attention {case.name}",
                kernel=_prefill_attention,
                signature={
                    **dict.fromkeys(("q", "out"), f"*{case.dtype}"),
                    **case.slots_types(case.tiles.prefill.keys),
                    **dict.fromkeys(("tiles", "tables"), "*i32"),
                    **dict.fromkeys(("num_tiles", "table_stride", "q_stride", "out_stride", "window"), "i32"),
                    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
                },
                constexprs={**case.absent, **_constants(case.shape, case.rule, case.tiles)},
                options=_options(case.tiles),
                aligned=frozenset(("q_stride", "out_stride")),
                may_spill=case.shape.head_dim > 128,
                uses_wgmma=case.dtype != "fp32",
                is_sample=case.is_sample,
            )
        )
    return found


def _constants(shape: HeadShape, rule: AttentionRule, tiles: AttentionTiles) -> dict[str, Any]:
    return {
        **shared_constants(shape, rule, tiles),
        "BLOCK_M": tiles.prefill.rows,
        "BLOCK_N": tiles.prefill.keys,
    }


def _options(tiles: AttentionTiles) -> dict[str, Any]:
    tile = tiles.prefill
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
