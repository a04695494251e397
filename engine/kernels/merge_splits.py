"""The second half of decode attention: a token's splits put together, in their order.

Owns the kernel that weighs the splits' sums by their largest scores. Which splits a token has follows from
its position and the rule alone, and so does the order of additions. See `engine.kernels.decode_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel
from engine.kernels.paged_kv import AttentionRule
from engine.kernels.shapes import shipped
from engine.kernels.tables import padded_head_dim
from engine.kernels.work import DecodeWork


@kernel()
def _merge_splits(
    sums: tl.pointer_type,
    stats: tl.pointer_type,
    out: tl.pointer_type,  # [num_tokens, num_heads, head_dim]
    merges: tl.pointer_type,  # int32 [num_sequences, 4]: first item, flat token, new, context
    out_stride: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits at a time
    BLOCK_D: tl.constexpr,
) -> None:
    head = tl.program_id(0) % NUM_HEADS
    token = tl.program_id(0) // NUM_HEADS % QUERIES
    sequence = tl.program_id(0) // (NUM_HEADS * QUERIES)
    item = tl.load(merges + 4 * sequence).to(tl.int64)
    start = tl.load(merges + 4 * sequence + 1).to(tl.int64)
    num_new = tl.load(merges + 4 * sequence + 2)
    num_keys = tl.load(merges + 4 * sequence + 3) + token + 1
    if token < num_new:
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(num_keys - window, 0) // SPLIT
        last = (num_keys + SPLIT - 1) // SPLIT
        splits = tl.arange(0, BLOCK_S)
        dims = tl.arange(0, BLOCK_D)
        base = (item * QUERIES + token) * NUM_HEADS + head
        top = float("-inf")
        for at in tl.range(first, last, BLOCK_S):
            place = base + (at + splits).to(tl.int64) * (QUERIES * NUM_HEADS)
            tops = tl.load(stats + 2 * place, mask=at + splits < last, other=float("-inf"))
            top = tl.maximum(top, tl.max(tops, 0))
        total = 0.0
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        for at in tl.range(first, last, BLOCK_S):
            place = base + (at + splits).to(tl.int64) * (QUERIES * NUM_HEADS)
            is_split = at + splits < last
            tops = tl.load(stats + 2 * place, mask=is_split, other=float("-inf"))
            totals = tl.load(stats + 2 * place + 1, mask=is_split, other=0.0)
            parts = tl.load(
                sums + place[:, None] * HEAD_DIM + dims[None, :],
                mask=is_split[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            weights = tl.exp2(tops - top)
            total += tl.sum(weights * totals, 0)
            acc += tl.sum(weights[:, None] * parts, 0)
        result = (acc / total).to(out.dtype.element_ty)
        tl.store(out + (start + token) * out_stride + head * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


def merge_splits(
    sums: torch.Tensor, stats: torch.Tensor, out: torch.Tensor, work: DecodeWork, rule: AttentionRule
) -> None:
    """Write the rows of `out [num_tokens, num_heads, head_dim]` that `work` names.

    `sums` fp32 `[num_items, queries, num_heads, head_dim]`: of each split, values times weights; `stats` fp32
    `[num_items, queries, num_heads, 2]`: its largest score, in units of log2, and the sum of its weights.
    """
    _, queries, num_heads, head_dim = sums.shape
    _merge_splits[(len(work.merges) * queries * num_heads,)](
        sums,
        stats,
        out,
        work.merges,
        out.stride(0),
        rule.window,
        **_constants(num_heads, head_dim, queries, work.split, rule),
        **_options(),
    )


def builds(arch: int) -> list[KernelBuild]:
    """What is launched on `arch`: see `engine.kernels.build`."""
    found = []
    for case in shipped(arch):
        if case.tiles.uses_tma or case.shape.has_scales:
            continue  # it does not read slots
        num_heads = case.shape.num_kv_heads * case.shape.group
        found.append(
            KernelBuild(
                name=f"merge_splits {case.name}",
                kernel=_merge_splits,
                signature={
                    **dict.fromkeys(("sums", "stats"), "*fp32"),
                    "out": f"*{case.dtype}",
                    "merges": "*i32",
                    **dict.fromkeys(("out_stride", "window"), "i32"),
                },
                constexprs=_constants(num_heads, case.shape.head_dim, 1, case.tiles.decode.split, case.rule),
                options=_options(),
                aligned=frozenset(("out_stride",)),
                may_spill=case.shape.head_dim > 128,
                is_sample=case.is_sample and arch == 90,
            )
        )
    return found


def _constants(
    num_heads: int, head_dim: int, queries: int, split: int, rule: AttentionRule
) -> dict[str, Any]:
    return {
        "HAS_WINDOW": rule.window > 0,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "QUERIES": queries,
        "SPLIT": split,
        "BLOCK_S": 16,
        "BLOCK_D": padded_head_dim(head_dim),
    }


def _options() -> dict[str, Any]:
    return {"num_warps": 4, "enable_fp_fusion": True}
