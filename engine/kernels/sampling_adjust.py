"""Bias, penalties and the minimum-length mask on the device; the definition is `engine.sampling.adjust`.

Owns the kernel, its launch and its twin. Nothing is kept between calls: tokens are counted anew from the
history, into a scratch row that is zero before and after. Only integers are added in no fixed order.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel
from engine.kernels.sampling_table import (
    BIAS_END,
    BIAS_START,
    COUNT_SLOT,
    FREQUENCY,
    HISTORY,
    MASK_END,
    MASK_START,
    NUM_PROMPT,
    POSITION,
    PRESENCE,
    REPETITION,
    ROW_DOUBLES,
    ROW_WORDS,
    SamplingBatch,
)

_BLOCK = 1024
_NUM_WARPS = 8
_PROMPT = tl.constexpr(1 << 30)  # marks a token of the prompt; below it, the count in the output


@kernel()
def _adjust(
    scores: tl.pointer_type,  # [num_rows, vocab], changed in place
    words: tl.pointer_type,  # the table: int32
    doubles: tl.pointer_type,  # the same as float64
    bias_ids: tl.pointer_type,
    bias_values: tl.pointer_type,
    mask_ids: tl.pointer_type,
    history: tl.pointer_type,
    counts: tl.pointer_type,  # int32 [num_counted, vocab], zeros
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    words += row * ROW_WORDS
    scores += row * VOCAB
    lanes = tl.arange(0, BLOCK)

    end = tl.load(words + BIAS_END)
    for start in range(tl.load(words + BIAS_START), end, BLOCK):
        inside = start + lanes < end
        ids = tl.load(bias_ids + start + lanes, mask=inside, other=0)
        value = tl.load(bias_values + start + lanes, mask=inside, other=0.0)
        tl.store(scores + ids, tl.load(scores + ids, mask=inside, other=0.0) + value, mask=inside)
    tl.debug_barrier()  # the next phase reads what other threads have written

    slot = tl.load(words + COUNT_SLOT)
    if slot >= 0:
        counts += slot.to(tl.int64) * VOCAB
        history += tl.load(words + HISTORY)
        num_prompt = tl.load(words + NUM_PROMPT)
        num_tokens = num_prompt + tl.load(words + POSITION)
        repetition = tl.load(words + REPETITION).to(tl.float32, bitcast=True)
        presence = tl.load(doubles + row * ROW_DOUBLES + PRESENCE)
        frequency = tl.load(doubles + row * ROW_DOUBLES + FREQUENCY)
        for start in range(0, num_tokens, BLOCK):
            place = start + lanes
            ids = tl.load(history + place, mask=place < num_tokens, other=0)
            tl.atomic_or(counts + ids, _PROMPT, mask=place < num_prompt, sem="relaxed")
            tl.atomic_add(counts + ids, 1, mask=(place >= num_prompt) & (place < num_tokens), sem="relaxed")
        tl.debug_barrier()
        for start in range(0, num_tokens, BLOCK):
            place = start + lanes
            ids = tl.load(history + place, mask=place < num_tokens, other=0)
            # of several lanes with the same token, the one that takes the count does the work
            count = tl.atomic_xchg(counts + ids, 0, mask=place < num_tokens, sem="relaxed")
            is_owner = (place < num_tokens) & (count != 0)
            value = tl.load(scores + ids, mask=is_owner, other=0.0)
            value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
            num_out = (count & (_PROMPT - 1)).to(tl.float64)
            penalty = (presence + frequency * num_out).to(tl.float32)
            value = tl.where(num_out > 0, value - penalty, value)
            tl.store(scores + ids, value, mask=is_owner)
        tl.debug_barrier()

    end = tl.load(words + MASK_END)
    for start in range(tl.load(words + MASK_START), end, BLOCK):
        inside = start + lanes < end
        ids = tl.load(mask_ids + start + lanes, mask=inside, other=0)
        tl.store(scores + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside)


def adjust(scores: torch.Tensor, batch: SamplingBatch) -> None:
    """Apply bias, penalties and mask to contiguous float32 `[num_rows, vocab]`, in place."""
    assert scores.is_contiguous()
    counts = torch.zeros((batch.num_counted, batch.vocab_size), dtype=torch.int32, device=scores.device)
    _adjust[(len(scores),)](
        scores,
        batch.table,
        batch.table.view(torch.float64),
        batch.bias_ids,
        batch.bias_values,
        batch.mask_ids,
        batch.history,
        counts,
        VOCAB=batch.vocab_size,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def adjust_reference(scores: torch.Tensor, batch: SamplingBatch) -> None:
    """The twin of `adjust` in plain torch, row by row."""
    for index, row in enumerate(scores):
        ints = batch.table[index].tolist()
        bias = slice(ints[BIAS_START.value], ints[BIAS_END.value])
        row[batch.bias_ids[bias].long()] += batch.bias_values[bias]
        if ints[COUNT_SLOT.value] >= 0:
            start, num_prompt = ints[HISTORY.value], ints[NUM_PROMPT.value]
            tokens = batch.history[start : start + num_prompt + ints[POSITION.value]].long()
            is_seen = torch.zeros_like(row, dtype=torch.bool).index_fill_(0, tokens, True)
            repetition = batch.floats(REPETITION)[index]
            row.copy_(torch.where(is_seen, torch.where(row > 0, row / repetition, row * repetition), row))
            count = torch.bincount(tokens[num_prompt:], minlength=len(row))
            penalty = batch.doubles(PRESENCE)[index] + batch.doubles(FREQUENCY)[index] * count
            row.copy_(torch.where(count > 0, row - penalty.float(), row))
        row[batch.mask_ids[ints[MASK_START.value] : ints[MASK_END.value]].long()] = -torch.inf


def builds(arch: int) -> list[KernelBuild]:
    """The kernel at a large vocabulary."""
    del arch  # bound by latency, alike everywhere
    ints = ("words", "bias_ids", "mask_ids", "history", "counts")
    return [
        KernelBuild(
            name="sampling adjust",
            kernel=_adjust,
            signature={
                **dict.fromkeys(ints, "*i32"),
                "scores": "*fp32",
                "doubles": "*fp64",
                "bias_values": "*fp32",
            },
            constexprs={"VOCAB": 151936, "BLOCK": _BLOCK},
            options={"num_warps": _NUM_WARPS, "enable_fp_fusion": False},
            is_sample=True,
        )
    ]
