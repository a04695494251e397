"""Log-probabilities on the device, of raw logits: of one token for each row and of the best ones.

Owns two kernels, their launch and their twin: the sum of each part of a row, and what is reported of it. The
definition is `engine.sampling.logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import inlined, kernel
from engine.kernels.sampling_search import depth_bits, gather, horizon, search
from engine.sampling.ranking import top_ids

_SPLIT = 4096
_TILE = 4096
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Logprobs:
    """`chosen` `[num_rows]` is the given tokens'; `top_ids` (int32) and `top` `[num_rows, num_top]` are the
    best tokens, by value descending, then id ascending. A row has as many as it wants; what is beyond is
    undefined.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@kernel()
def _sums(
    logits: tl.pointer_type,  # [num_rows, vocab]
    wanted: tl.pointer_type,  # int32 [num_rows], see `token_logprobs`
    sums: tl.pointer_type,  # [num_rows, 2, num_splits]: maximum, sum of exponentials relative to it
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    row, split, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(wanted + row) >= 0:
        ids = split * SPLIT + tl.arange(0, SPLIT)
        value = tl.load(logits + row * stride + ids, mask=ids < VOCAB, other=float("-inf"))
        best = tl.max(value, axis=0)
        base = tl.where(best == float("-inf"), 0.0, best)
        tl.store(sums + 2 * row * num_splits + split, best)
        tl.store(sums + (2 * row + 1) * num_splits + split, tl.sum(tl.exp(value - base), axis=0))


@inlined
def _ranked(values: tl.tensor, ids: tl.tensor, lanes: tl.tensor, num: tl.tensor) -> tl.tensor:
    """The place of each of the first `num` lanes by value descending, then id ascending."""
    mine, other = values[:, None], values[None, :]
    is_before = (other > mine) | ((other == mine) & (ids[None, :] < ids[:, None]))
    return tl.sum((is_before & (lanes < num)[None, :]).to(tl.int32), axis=1)


@inlined
def _pick(
    logits: tl.pointer_type,
    best: tl.tensor,
    depth: tl.tensor,
    num_equal: tl.tensor,
    picked: tl.pointer_type,  # int32 [VOCAB]
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the ids above `depth` and of the first `num_equal` at `depth` to `picked`, in order of id."""
    num, seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        bits = depth_bits(logits, ids, ids < VOCAB, best, 1.0)
        if tl.min(bits, axis=0) <= depth:
            is_equal = (bits == depth).to(tl.int32)
            rank = seen + tl.cumsum(is_equal, axis=0)
            is_picked = ((bits < depth) | ((is_equal > 0) & (rank <= num_equal))).to(tl.int32)
            places = num + tl.cumsum(is_picked, axis=0) - is_picked
            tl.store(picked + places, ids, mask=is_picked > 0)
            num += tl.sum(is_picked, axis=0)
            seen += tl.sum(is_equal, axis=0)
    tl.debug_barrier()  # what one thread wrote, others read


@kernel(varying=("width",))
def _report(
    logits: tl.pointer_type,
    token_ids: tl.pointer_type,  # int32 [num_rows]
    wanted: tl.pointer_type,
    sums: tl.pointer_type,
    found: tl.pointer_type,  # int32 [num_rows, vocab], scratch; only with NUM_TOP
    chosen: tl.pointer_type,  # [num_rows]
    top_ids: tl.pointer_type,  # int32 [num_rows, width]
    top: tl.pointer_type,  # [num_rows, width]
    stride: tl.tensor,
    width: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_TOP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    num = tl.load(wanted + row)
    if num >= 0:
        splits = tl.arange(0, SPLITS)
        is_split = splits < NUM_SPLITS
        sums += 2 * row * NUM_SPLITS
        parts = tl.load(sums + splits, mask=is_split, other=float("-inf"))
        best = tl.max(parts, axis=0)
        part_sums = tl.load(sums + NUM_SPLITS + splits, mask=is_split, other=0.0)
        log_sum = tl.log(tl.sum(part_sums * tl.exp(parts - best), axis=0))
        tl.store(chosen + row, tl.load(logits + tl.load(token_ids + row)) - best - log_sum)
        if NUM_TOP > 0:  # noqa: SIM102  (decided by the compiler)
            if (num > 0) & (tl.abs(best) < float("inf")):
                found += row * VOCAB
                border, _ = horizon(logits, best, 1.0, True, num.to(tl.float32), VOCAB, TILE)
                num_near = gather(logits, best, 1.0, border, found, VOCAB, TILE)
                deepest = tl.full((), 0xFFFFFFFF, tl.uint32)
                depth, above = search(found, num_near, True, num.to(tl.float32), deepest, TILE)
                tl.debug_barrier()  # the depths are read, their place is taken by ids
                _pick(logits, best, depth, num - above.to(tl.int32), found, VOCAB, TILE)
                lanes = tl.arange(0, NUM_TOP)
                ids = tl.load(found + lanes, mask=lanes < num, other=0)
                values = tl.load(logits + ids)
                place = row * width + _ranked(values, ids, lanes, num)
                tl.store(top_ids + place, ids, mask=lanes < num)
                tl.store(top + place, values - best - log_sum, mask=lanes < num)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> Logprobs:
    """Log-softmax of float32 `[num_rows, vocab]` at int32 `token_ids` `[num_rows]` and at the best tokens.

    `wanted` (int32 `[num_rows]`) says how many best tokens a row wants, at most `num_top`; -1: nothing of the
    row is looked at, its results are undefined. Undefined too where logits are not finite.
    """
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_splits = triton.cdiv(vocab_size, _SPLIT)
    new = logits.new_empty
    sums = new((num_rows, 2, num_splits))
    found = new((num_rows if num_top > 0 else 0, vocab_size), dtype=torch.int32)
    result = Logprobs(new((num_rows,)), new((num_rows, num_top), dtype=torch.int32), new((num_rows, num_top)))
    options = {"VOCAB": vocab_size, "num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    _sums[(num_rows, num_splits)](logits, wanted, sums, logits.stride(0), SPLIT=_SPLIT, **options)
    _report[(num_rows,)](
        logits,
        token_ids,
        wanted,
        sums,
        found,
        result.chosen,
        result.top_ids,
        result.top,
        logits.stride(0),
        num_top,
        NUM_SPLITS=num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        NUM_TOP=triton.next_power_of_2(num_top) if num_top > 0 else 0,
        TILE=_TILE,
        **options,
    )
    return result


def token_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> Logprobs:
    """The twin of `token_logprobs` in plain torch."""
    del wanted  # all of all rows
    logprobs = torch.log_softmax(logits, dim=-1)
    top = top_ids(logits, num_top)
    chosen = logprobs.gather(-1, token_ids.long()[:, None])[:, 0]
    return Logprobs(chosen, top.to(torch.int32), logprobs.gather(-1, top))


def builds(arch: int) -> list[KernelBuild]:
    """Both kernels at a large vocabulary, for a chosen token only and for the 20 best."""
    del arch  # bound by latency, alike everywhere
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    sums = KernelBuild(
        name="sampling logprobs: sums",
        kernel=_sums,
        signature={"logits": "*fp32", "wanted": "*i32", "sums": "*fp32", "stride": "i32"},
        constexprs={"VOCAB": 151936, "SPLIT": _SPLIT},
        options=options,
        aligned=frozenset({"stride"}),
    )
    return [sums, *(_report_build(num_top, options) for num_top in (0, 32))]


def _report_build(num_top: int, options: dict[str, int]) -> KernelBuild:
    return KernelBuild(
        name=f"sampling logprobs: top {num_top}",
        kernel=_report,
        signature={
            **dict.fromkeys(("logits", "sums", "chosen", "top"), "*fp32"),
            **dict.fromkeys(("token_ids", "wanted", "found", "top_ids"), "*i32"),
            **dict.fromkeys(("stride", "width"), "i32"),
        },
        constexprs={"VOCAB": 151936, "NUM_SPLITS": 38, "SPLITS": 64, "NUM_TOP": num_top, "TILE": _TILE},
        options=options,
        aligned=frozenset({"stride"}),
        is_sample=num_top > 0,
    )
