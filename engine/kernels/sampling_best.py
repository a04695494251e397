"""The best score of each row: what scaled logits are measured from, and whether a row can be sampled at all.

Owns the kernel, its launch and its twin. Rows are looked at in parts of one size; who needs the row's best
reduces the few maxima itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import inlined, kernel

SPLIT = 4096  # tokens of a part
_NUM_WARPS = 8


@kernel()
def _best(scores: tl.pointer_type, bests: tl.pointer_type, VOCAB: tl.constexpr, SPLIT: tl.constexpr) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    value = tl.load(scores + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    is_broken = tl.max((value != value).to(tl.int32), axis=0) > 0
    best = tl.where(is_broken, float("inf"), tl.max(tl.where(is_broken, 0.0, value), axis=0))
    tl.store(bests + row * tl.num_programs(1) + split, best)


@inlined
def row_best(bests: tl.pointer_type, num_splits: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """The maximum of a row from those of its parts."""
    splits = tl.arange(0, SPLITS)
    return tl.max(tl.load(bests + splits, mask=splits < num_splits, other=float("-inf")), axis=0)


def row_bests(scores: torch.Tensor) -> torch.Tensor:
    """The maximum of each part of contiguous float32 `[num_rows, vocab]`: `[num_rows, num_splits]`.

    Infinite for a part with a NaN.
    """
    assert scores.is_contiguous()
    num_rows, vocab_size = scores.shape
    num_splits = triton.cdiv(vocab_size, SPLIT)
    bests = torch.empty((num_rows, num_splits), dtype=torch.float32, device=scores.device)
    _best[(num_rows, num_splits)](
        scores, bests, VOCAB=vocab_size, SPLIT=SPLIT, num_warps=_NUM_WARPS, enable_fp_fusion=False
    )
    return bests


def row_bests_reference(scores: torch.Tensor) -> torch.Tensor:
    """The twin of `row_bests` in plain torch, with a whole row as its only part."""
    best = scores.amax(-1, keepdim=True)
    return best.masked_fill(best.isnan(), torch.inf)


def builds(arch: int) -> list[KernelBuild]:
    """The kernel at a large vocabulary."""
    del arch  # bound by memory, alike everywhere
    return [
        KernelBuild(
            name="sampling best",
            kernel=_best,
            signature={"scores": "*fp32", "bests": "*fp32"},
            constexprs={"VOCAB": 151936, "SPLIT": SPLIT},
            options={"num_warps": _NUM_WARPS, "enable_fp_fusion": False},
        )
    ]
