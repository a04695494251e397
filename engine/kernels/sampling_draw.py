"""The draw itself: argmin of log E − x over what the filters keep, ties to the lowest id; greedy rows too.

Owns two kernels, their launch and their twin: the winner of each part of a row, and the winner of the row.
Parts have one fixed size, so that a row's token does not depend on the batch.

Scores are estimated in float32 first. A row has one winner within the estimate's error nearly always; if not,
the parts in question are computed again in the noise's own float64, so the token is the definition's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import inlined, kernel
from engine.kernels.sampling_best import SPLIT, row_best
from engine.kernels.sampling_noise import FAST_ERROR, log_exponential, log_exponential_fast, token_hash
from engine.kernels.sampling_search import OUTSIDE, depth_bits
from engine.kernels.sampling_table import DEPTH, ROW_WORDS, TEMPERATURE, SamplingBatch
from engine.sampling.noise import log_exponential as reference_noise

_NUM_WARPS = 8
_MARGIN = 10 * FAST_ERROR  # scores farther apart than this are told apart by their estimates


@dataclass(frozen=True, slots=True)
class Draws:
    """A token for each row, all `[num_rows]` on the device: `token_ids` int32, `gaps` float32, `is_finite`
    int32.

    A gap is the lead of the winner's perturbed score over the next kept one (greedy: of logits), in units of
    logits below temperature 1; how near filter decisions were is not part of it. Where the scores are not
    finite (`is_finite` 0) the token is 0 and means nothing.
    """

    token_ids: torch.Tensor
    gaps: torch.Tensor
    is_finite: torch.Tensor


@inlined
def _perturbed(
    scores: tl.pointer_type,
    words: tl.pointer_type,
    cuts: tl.pointer_type,
    ids: tl.tensor,
    best: tl.tensor,
    IS_CUT: tl.constexpr,
    IS_EXACT: tl.constexpr,
    VOCAB: tl.constexpr,
) -> tl.tensor:
    """x − log E of each id of a row, -inf where it may not be drawn; the score itself if greedy."""
    temperature = tl.load(words + TEMPERATURE).to(tl.float32, bitcast=True)
    inside = ids < VOCAB
    if temperature > 0.0:
        bits = depth_bits(scores, ids, inside, best, temperature)
        is_kept = inside & (
            bits.to(tl.float32, bitcast=True) <= tl.load(words + DEPTH).to(tl.float32, bitcast=True)
        )
        if IS_CUT:
            border = tl.load(cuts).to(tl.uint32, bitcast=True)
            is_kept &= (bits < border) | ((bits == border) & (ids <= tl.load(cuts + 1)))
        h = token_hash(ids, words)
        noise = log_exponential(h) if IS_EXACT else log_exponential_fast(h)
        result = tl.where(is_kept, -bits.to(tl.float32, bitcast=True) - noise, float("-inf"))
    else:
        result = tl.load(scores + ids, mask=inside, other=float("-inf"))
    return result


@inlined
def _winner(values: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The greatest value, the lowest id that has it, and the greatest value of the others."""
    top = tl.max(values, axis=0)
    winner = tl.min(tl.where(values == top, ids, 0x7FFFFFFF), axis=0)
    return top, winner, tl.max(tl.where(ids == winner, float("-inf"), values), axis=0)


@kernel()
def _draw(
    scores: tl.pointer_type,  # [num_rows, vocab]
    bests: tl.pointer_type,  # [num_rows, num_splits]
    words: tl.pointer_type,
    cuts: tl.pointer_type,  # int32 [num_rows, 2]; only with IS_CUT
    tops: tl.pointer_type,  # [num_rows, 2, num_splits]: of each part the best score and the next
    winners: tl.pointer_type,  # int32 [num_rows, num_splits]
    IS_CUT: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    row, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    best = row_best(bests + row * num_splits, num_splits, SPLITS)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    values = _perturbed(
        scores + row * VOCAB, words + row * ROW_WORDS, cuts + 2 * row, ids, best, IS_CUT, False, VOCAB
    )
    top, winner, second = _winner(values, ids)
    tl.store(tops + 2 * row * num_splits + split, top)
    tl.store(tops + (2 * row + 1) * num_splits + split, second)
    tl.store(winners + row * num_splits + split, winner)


@kernel()
def _finish(
    scores: tl.pointer_type,
    bests: tl.pointer_type,
    words: tl.pointer_type,
    cuts: tl.pointer_type,
    tops: tl.pointer_type,
    winners: tl.pointer_type,
    token_ids: tl.pointer_type,  # int32 [num_rows]
    gaps: tl.pointer_type,
    is_finite: tl.pointer_type,  # int32 [num_rows]
    IS_CUT: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    MARGIN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best = row_best(bests + row * NUM_SPLITS, NUM_SPLITS, SPLITS)
    tops += 2 * row * NUM_SPLITS
    splits = tl.arange(0, SPLITS)
    is_split = splits < NUM_SPLITS
    top = tl.load(tops + splits, mask=is_split, other=float("-inf"))
    second = tl.load(tops + NUM_SPLITS + splits, mask=is_split, other=float("-inf"))
    winner_of_split = tl.load(winners + row * NUM_SPLITS + splits, mask=is_split, other=-1)
    lead = tl.max(top, axis=0)
    winner = tl.min(tl.where(top == lead, winner_of_split, 0x7FFFFFFF), axis=0)
    others = tl.max(tl.where(winner_of_split == winner, second, top), axis=0)
    temperature = tl.load(words + row * ROW_WORDS + TEMPERATURE).to(tl.float32, bitcast=True)
    if (temperature > 0.0) & (others >= lead - MARGIN):
        exact_lead = tl.full((), float("-inf"), tl.float32)
        for split in range(NUM_SPLITS):
            if tl.load(tops + split) >= lead - MARGIN:
                ids = split * SPLIT + tl.arange(0, SPLIT)
                values = _perturbed(
                    scores + row * VOCAB,
                    words + row * ROW_WORDS,
                    cuts + 2 * row,
                    ids,
                    best,
                    IS_CUT,
                    True,
                    VOCAB,
                )
                exact, exact_winner, _ = _winner(values, ids)
                if exact > exact_lead:  # of equals the first, which has the lower id
                    exact_lead = exact
                    winner = exact_winner
    is_good = tl.abs(best) < float("inf")
    unit = tl.where(temperature > 0.0, tl.minimum(temperature, 1.0), 1.0)
    tl.store(token_ids + row, tl.where(is_good, winner, 0))
    tl.store(gaps + row, (lead - others) * unit)
    tl.store(is_finite + row, is_good.to(tl.int32))


def draw(
    scores: torch.Tensor,
    bests: torch.Tensor,
    cuts: torch.Tensor | None,
    batch: SamplingBatch,
    margin: float = _MARGIN,
) -> Draws:
    """A token of each row of contiguous float32 `[num_rows, vocab]`.

    `bests` is from `row_bests`, `cuts` from `filter_cuts` (None: no row has top-k or top-p). Tokens within
    `margin` of the best estimate are compared by the noise's definition.
    """
    num_rows, num_splits = bests.shape
    assert scores.is_contiguous()
    assert num_splits == triton.cdiv(batch.vocab_size, SPLIT)
    device = scores.device
    tops = torch.empty((num_rows, 2, num_splits), dtype=torch.float32, device=device)
    winners = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    draws = Draws(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    inputs = (scores, bests, batch.table, batch.table if cuts is None else cuts, tops, winners)
    constants = {
        "IS_CUT": cuts is not None,
        "VOCAB": batch.vocab_size,
        "SPLIT": SPLIT,
        "SPLITS": triton.next_power_of_2(num_splits),
        "num_warps": _NUM_WARPS,
        "enable_fp_fusion": False,
    }
    _draw[(num_rows, num_splits)](*inputs, **constants)
    _finish[(num_rows,)](
        *inputs,
        draws.token_ids,
        draws.gaps,
        draws.is_finite,
        NUM_SPLITS=num_splits,
        MARGIN=margin,
        **constants,
    )
    return draws


def draw_reference(
    scores: torch.Tensor,
    bests: torch.Tensor,
    cuts: torch.Tensor | None,
    batch: SamplingBatch,
    margin: float = _MARGIN,
) -> Draws:
    """The twin of `draw` in plain torch: the definition for every token."""
    del margin
    best = bests.amax(-1, keepdim=True)
    temperature = batch.floats(TEMPERATURE)[:, None]
    depth = ((scores - best) / torch.where(temperature > 0, temperature, 1.0)).abs()
    is_kept = depth <= batch.floats(DEPTH)[:, None]
    ids = torch.arange(batch.vocab_size, dtype=torch.int32, device=scores.device)[None, :]
    if cuts is not None:
        bits, border = depth.view(torch.int32).long(), cuts[:, :1].long() & OUTSIDE.value
        is_kept &= (bits < border) | ((bits == border) & (ids <= cuts[:, 1:]))
    noise = reference_noise(ids, batch.noise_keys())
    values = torch.where(is_kept, -depth - noise, -torch.inf)
    values = torch.where(temperature > 0, values, scores)
    token_ids = values.argmax(-1, keepdim=True)
    top = values.gather(-1, token_ids)
    second = values.scatter(-1, token_ids, -torch.inf).amax(-1, keepdim=True)
    unit = torch.where(temperature > 0, temperature.clamp(max=1.0), 1.0)
    is_finite = best.isfinite()
    return Draws(
        token_ids.masked_fill(~is_finite, 0)[:, 0].to(torch.int32),
        ((top - second) * unit)[:, 0],
        is_finite[:, 0].to(torch.int32),
    )


def builds(arch: int) -> list[KernelBuild]:
    """Both kernels at a large vocabulary, with top-k or top-p."""
    del arch  # bound by latency, alike everywhere
    size = {"VOCAB": 151936, "SPLIT": SPLIT}
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    floats = dict.fromkeys(("scores", "bests", "tops"), "*fp32")
    ints = dict.fromkeys(("words", "cuts", "winners"), "*i32")
    results = {"token_ids": "*i32", "gaps": "*fp32", "is_finite": "*i32"}
    return [
        KernelBuild(
            "sampling draw",
            _draw,
            {**floats, **ints},
            {**size, "IS_CUT": True, "SPLITS": 64},
            options,
            is_sample=True,
        ),
        KernelBuild(
            "sampling finish",
            _finish,
            {**floats, **ints, **results},
            {**size, "IS_CUT": True, "SPLITS": 64, "NUM_SPLITS": 38, "MARGIN": _MARGIN},
            options,
        ),
    ]
