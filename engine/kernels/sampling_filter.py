"""Top-k and top-p on the device: for each row the depth of the last token that may be drawn, no sorting.

Owns the kernel, its launch and its twin. The definition is `engine.sampling.filters`. Min-p needs no search:
the draw applies it by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel
from engine.kernels.sampling_best import row_best
from engine.kernels.sampling_search import (
    OUTSIDE,
    gather,
    horizon,
    last_of_equals,
    measure,
    search,
    weight,
)
from engine.kernels.sampling_table import (
    CUT_SLOT,
    ROW_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingBatch,
)

_TILE = 4096
_NUM_WARPS = 16


@kernel()
def _cut(
    scores: tl.pointer_type,  # [num_rows, vocab]
    bests: tl.pointer_type,  # [num_rows, num_splits]
    words: tl.pointer_type,
    found: tl.pointer_type,  # int32 [num_cut, vocab], scratch
    cuts: tl.pointer_type,  # int32 [num_rows, 2]
    VOCAB: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    words += row * ROW_WORDS
    scores += row * VOCAB
    best = row_best(bests + row * NUM_SPLITS, NUM_SPLITS, SPLITS)
    depth = tl.full((), OUTSIDE, tl.uint32)
    last = tl.full((), VOCAB, tl.int32)
    slot = tl.load(words + CUT_SLOT)
    if (slot >= 0) & (tl.abs(best) < float("inf")):
        found += slot.to(tl.int64) * VOCAB
        temperature = tl.load(words + TEMPERATURE).to(tl.float32, bitcast=True)
        top_p = tl.load(words + TOP_P).to(tl.float32, bitcast=True)
        top_k = tl.load(words + TOP_K)
        target = tl.where(top_k > 0, top_k.to(tl.float32), top_p)
        border, total = horizon(scores, best, temperature, top_k > 0, target, VOCAB, TILE)
        num = gather(scores, best, temperature, border, found, VOCAB, TILE)

        kept = tl.full((), VOCAB, tl.int32)  # how many of those at the last depth may be drawn
        if top_k > 0:
            depth, above = search(found, num, True, target, depth, TILE)
            kept = top_k - above.to(tl.int32)
            num_equal, mass = measure(found, num, depth, TILE)
            total = mass + kept.to(tl.float32) * weight(depth, False)
        if top_p < float("inf"):
            k_depth = depth
            depth, above = search(found, num, False, top_p * total, depth, TILE)
            share = weight(depth, False)  # of one of those at the last depth; 0 and NaN: far below the rest
            room = tl.div_rn(top_p * total - above, tl.where(share > 0, share, 1e-30))
            num_in = tl.maximum(tl.ceil(tl.minimum(room, VOCAB)).to(tl.int32), 1)  # one token at least
            kept = tl.where(depth == k_depth, tl.minimum(num_in, kept), num_in)
        num_equal, mass = measure(found, num, depth, TILE)
        if kept < num_equal:
            last = last_of_equals(scores, best, temperature, depth, kept, VOCAB, TILE)
    tl.store(cuts + 2 * row, depth.to(tl.int32, bitcast=True))
    tl.store(cuts + 2 * row + 1, last)


def filter_cuts(scores: torch.Tensor, bests: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Where top-k and top-p end for each row of float32 `[num_rows, vocab]`: int32 `[num_rows, 2]`.

    `bests` `[num_rows, num_splits]` are maxima of parts of the rows. The first number is the depth (bits of
    the float, read as unsigned) of the last token that may be drawn, the second the greatest id that may be
    drawn at that depth. A depth is how far x = (score - best) / temperature lies below 0.
    """
    cuts = torch.empty((len(scores), 2), dtype=torch.int32, device=scores.device)
    found = torch.empty((batch.num_cut, batch.vocab_size), dtype=torch.int32, device=scores.device)
    num_splits = bests.shape[1]
    _cut[(len(scores),)](
        scores,
        bests,
        batch.table,
        found,
        cuts,
        VOCAB=batch.vocab_size,
        NUM_SPLITS=num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        TILE=_TILE,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    return cuts


def filter_cuts_reference(scores: torch.Tensor, bests: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The twin of `filter_cuts` in plain torch, by sorting."""
    temperature = batch.floats(TEMPERATURE)[:, None]
    x = (scores - bests.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(batch.vocab_size, device=x.device)[None, :]
    top_k = batch.ints(TOP_K)[:, None]
    in_k = (rank < top_k) | (top_k == 0)
    mass = values.masked_fill(~in_k, -torch.inf).softmax(-1)
    before = mass.cumsum(-1).roll(1, -1)
    before[:, 0] = -torch.inf  # one token at least
    kept = in_k & (before < batch.floats(TOP_P)[:, None])
    final = kept.sum(-1, keepdim=True) - 1
    depth = values.gather(-1, final).abs().view(torch.int32)
    cuts = torch.cat([depth, ids.gather(-1, final).to(torch.int32)], dim=1)
    is_off = (batch.ints(CUT_SLOT) < 0)[:, None]
    return cuts.masked_fill(is_off, -1)


def builds(arch: int) -> list[KernelBuild]:
    """The kernel at a large vocabulary."""
    del arch  # one program per row, alike everywhere
    return [
        KernelBuild(
            name="sampling top-k top-p",
            kernel=_cut,
            signature={
                **dict.fromkeys(("scores", "bests"), "*fp32"),
                **dict.fromkeys(("words", "found", "cuts"), "*i32"),
            },
            constexprs={"VOCAB": 151936, "NUM_SPLITS": 38, "SPLITS": 64, "TILE": _TILE},
            options={"num_warps": _NUM_WARPS, "enable_fp_fusion": False},
            is_sample=True,
        )
    ]
