"""Attention of one to eight new tokens per sequence over the paged KV pool: decodes and verified drafts.

Owns the kernel that attends to one split of a sequence's context, always the same number of keys, for all new
tokens and all query heads that share a KV head (Dao et al., Flash-Decoding, 2023); `merge_splits` puts a
token's splits together. Sizes are the table's and never the batch's, so a token's result depends on its own
sequence only, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel
from engine.kernels.merge_splits import merge_splits
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
from engine.kernels.work import MAX_QUERIES, DecodeWork


@kernel(varying=("table_stride",))
def _decode_splits(
    q: tl.pointer_type,  # [num_tokens, num_heads, head_dim]
    keys: tl.pointer_type,  # [num_blocks, num_kv_heads, block_size, head_dim], or a descriptor of it
    values: tl.pointer_type,
    key_scales: tl.pointer_type,  # fp32 [num_blocks, num_kv_heads, block_size], if there are any
    value_scales: tl.pointer_type,
    sums: tl.pointer_type,  # fp32 [num_items, QUERIES, num_heads, head_dim]
    stats: tl.pointer_type,  # fp32 [num_items, QUERIES, num_heads, 2]: largest score, sum of weights
    items: tl.pointer_type,  # int32 [num_items, 5]: sequence, split, flat token, new, context
    num_items: tl.pointer_type,  # int32 [1]
    tables: tl.pointer_type,  # int32 [num_sequences, table_stride]
    table_stride: tl.tensor,
    q_stride: tl.tensor,  # elements from token to token
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
    QUERIES: tl.constexpr,  # new tokens that a sequence may have
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
) -> None:
    ROW_TILES: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < HEAD_DIM)[None, :]
    # One round each when the launch knows the work; many when a recorded launch has a fixed size.
    for work in tl.range(
        tl.program_id(0), tl.load(num_items) * (NUM_KV_HEADS * ROW_TILES), tl.num_programs(0)
    ):
        kv_head = work % NUM_KV_HEADS
        item = work // (NUM_KV_HEADS * ROW_TILES)
        sequence = tl.load(items + 5 * item).to(tl.int64)
        split = tl.load(items + 5 * item + 1)
        start = tl.load(items + 5 * item + 2).to(tl.int64)
        num_new = tl.load(items + 5 * item + 3)
        context = tl.load(items + 5 * item + 4)

        rows = work // NUM_KV_HEADS % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        tokens = tl.minimum(rows // GROUP, num_new - 1)  # rows beyond the last token repeat it
        heads = kv_head * GROUP + rows % GROUP
        q_rows = q + (start + tokens) * q_stride + heads * HEAD_DIM
        q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=is_dim, other=0.0)

        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        begin = split * SPLIT
        last = tl.minimum(begin + SPLIT, context + num_new)
        low = begin
        # Keys that all rows see, in whole tiles; then those that some see.
        shared = tl.maximum(begin, tl.minimum(last, (context + 1) // BLOCK_N * BLOCK_N))
        if HAS_WINDOW:
            low = tl.maximum(begin, context + 1 - window)
            shared = low // BLOCK_N * BLOCK_N
        else:
            acc, top, total = attend(
                acc, top, total, q_tile, context + tokens, keys, values, key_scales, value_scales,
                tables + sequence * table_stride, kv_head, begin, shared, low, scale, soft_cap, window, False,
                HAS_SCALES, HAS_CAP, HAS_WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
                USE_TMA, PRECISION, WIDENED,
            )  # fmt: skip
        acc, top, total = attend(
            acc, top, total, q_tile, context + tokens, keys, values, key_scales, value_scales,
            tables + sequence * table_stride, kv_head, shared, last, low, scale, soft_cap, window, True,
            HAS_SCALES, HAS_CAP, HAS_WINDOW, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, USE_TMA,
            PRECISION, WIDENED,
        )  # fmt: skip

        places = (tokens.to(tl.int64) + item * QUERIES) * (NUM_KV_HEADS * GROUP) + heads
        is_row = rows < num_new * GROUP
        tl.store(sums + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_row[:, None] & is_dim)
        tl.store(stats + 2 * places, top, mask=is_row)
        tl.store(stats + 2 * places + 1, total, mask=is_row)


def decode_attention(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    work: DecodeWork,
    rule: AttentionRule,
    tiles: AttentionTiles,
) -> None:
    """Attend with the rows of `q` that `work` names and write the same rows of `out`.

    `q` and `out` are `[num_tokens, num_heads, head_dim]`; a token's heads are contiguous.
    """
    assert q.stride(1) == out.stride(1) == kv.head_dim
    assert work.split == tiles.decode.split
    shape = shape_of(q, kv)
    constants = _constants(shape, rule, tiles, work.queries)
    capacity, num_heads = len(work.items), q.shape[1]
    sums = q.new_empty((capacity, work.queries, num_heads, kv.head_dim), dtype=torch.float32)
    stats = q.new_empty((capacity, work.queries, num_heads, 2), dtype=torch.float32)
    keys, values = slots_arguments(kv, tiles.decode.keys, tiles.uses_tma)
    row_tiles = -(-work.queries * shape.group // constants["BLOCK_M"])
    _decode_splits[(capacity * kv.num_kv_heads * row_tiles,)](
        q,
        keys,
        values,
        kv.key_scales,
        kv.value_scales,
        sums,
        stats,
        work.items,
        work.num_items,
        work.tables,
        work.tables.stride(0),
        q.stride(0),
        kernel_scale(rule),
        rule.soft_cap,
        rule.window,
        **constants,
        **_options(tiles, constants["BLOCK_M"]),
    )
    merge_splits(sums, stats, out, work, rule)


def builds(arch: int) -> list[KernelBuild]:
    """What is launched on `arch`: see `engine.kernels.build`."""
    found = []
    for case in shipped(arch):
        for queries in (1, MAX_QUERIES):
            constants = _constants(case.shape, case.rule, case.tiles, queries)
            found.append(
                KernelBuild(
                    name=f"decode_attention {case.name}, queries {queries}",
                    kernel=_decode_splits,
                    signature={
                        "q": f"*{case.dtype}",
                        **case.slots_types(case.tiles.decode.keys),
                        **dict.fromkeys(("sums", "stats"), "*fp32"),
                        **dict.fromkeys(("items", "num_items", "tables"), "*i32"),
                        **dict.fromkeys(("table_stride", "q_stride", "window"), "i32"),
                        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
                    },
                    constexprs={**case.absent, **constants},
                    options=_options(case.tiles, constants["BLOCK_M"]),
                    aligned=frozenset(("q_stride",)),
                    may_spill=case.shape.head_dim > 128,
                    is_sample=case.is_sample and queries == 1,
                )
            )
    return found


def _constants(shape: HeadShape, rule: AttentionRule, tiles: AttentionTiles, queries: int) -> dict[str, Any]:
    """`BLOCK_M` follows from the shape and from whether there are drafts: never from the batch."""
    rows = 1 << (queries * shape.group - 1).bit_length()
    return {
        **shared_constants(shape, rule, tiles),
        "QUERIES": queries,
        "SPLIT": tiles.decode.split,
        "BLOCK_M": max(16, min(rows, tiles.decode.rows)),
        "BLOCK_N": tiles.decode.keys,
    }


def _options(tiles: AttentionTiles, rows: int) -> dict[str, Any]:
    tile = tiles.decode
    # 64 rows are too many sums for the registers of four warps
    num_warps = tile.num_warps if rows < 64 else max(8, tile.num_warps)
    return {"num_warps": num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
