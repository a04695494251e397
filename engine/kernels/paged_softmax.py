"""What prefill and decode attention share inside their kernels: keys from pages, softmax on the way.

Owns the addresses of a tile of slots and one pass over a range of keys with a running maximum and sum
(Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691). Scores are kept in units
of log2, so that the exponential is one instruction. Sums are fp32.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from engine.kernels.jit import inlined


@inlined
def load_blocks(
    table: tl.pointer_type,
    first: tl.tensor,
    last: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
) -> tl.tensor:
    """The blocks that hold keys `first : first + BLOCK_N`; 0 for keys from `last` on."""
    if USE_TMA:
        blocks = tl.load(table + first // BLOCK_SIZE, mask=first < last, other=0)
    else:
        keys = first + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < last, other=0)
    return blocks


@inlined
def load_slots(
    pool: tl.pointer_type,  # [num_blocks, num_kv_heads, block_size, head_dim], or its descriptor
    blocks: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,  # the tile's first key, a multiple of BLOCK_N
    low: tl.tensor,
    last: tl.tensor,
    MASKED: tl.constexpr,  # keys outside of [low, last) are not read and come as 0
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_N, BLOCK_D]` keys or values."""
    keys = first + tl.arange(0, BLOCK_N)
    is_read = (keys >= low) & (keys < last)
    if USE_TMA:
        slots = pool.load([(blocks * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE, 0])
        if MASKED:
            slots = tl.where(is_read[:, None], slots, 0.0)
    else:
        dims = tl.arange(0, BLOCK_D)
        rows = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        address = pool + rows[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            slots = tl.load(address, mask=is_read[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            slots = tl.load(address)
        else:
            slots = tl.load(address, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return slots


@inlined
def load_scales(
    scales: tl.pointer_type,  # [num_blocks, num_kv_heads, block_size]
    blocks: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    last: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_N]` scales of keys or values."""
    keys = first + tl.arange(0, BLOCK_N)
    rows = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
    return tl.load(scales + rows, mask=(keys >= low) & (keys < last), other=0.0)


@inlined
def product(
    a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr, WIDENED: tl.constexpr
) -> tl.tensor:
    """`acc + a @ b`."""
    if WIDENED:  # the interpreter takes the bits of bf16 for integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@inlined
def attend(
    acc: tl.tensor,  # [BLOCK_M, BLOCK_D], weighted sum of values
    top: tl.tensor,  # [BLOCK_M], largest score so far
    total: tl.tensor,  # [BLOCK_M], sum of weights
    q: tl.tensor,  # [BLOCK_M, BLOCK_D]
    positions: tl.tensor,  # [BLOCK_M]
    keys: tl.pointer_type,
    values: tl.pointer_type,
    key_scales: tl.pointer_type,
    value_scales: tl.pointer_type,
    table: tl.pointer_type,
    kv_head: tl.tensor,
    first: tl.tensor,  # keys [first, last) are attended to; first is a multiple of BLOCK_N
    last: tl.tensor,
    low: tl.tensor,  # no row sees a key below
    scale: tl.tensor,  # of a score, in units of log2 when there is no cap
    soft_cap: tl.tensor,
    window: tl.tensor,
    MASKED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
) -> Any:
    """Go on with keys `[first, last)`: new `(acc, top, total)`. Without MASKED, all rows see all of them."""
    # Loaded one tile ahead: a load that waits for a load would cost a stage of the loop's pipeline.
    blocks = load_blocks(table, first, last, BLOCK_SIZE, BLOCK_N, USE_TMA)
    for start in tl.range(first, last, BLOCK_N):
        k = load_slots(
            keys, blocks, kv_head, start, low, last, MASKED,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, USE_TMA,
        )  # fmt: skip
        zero = tl.zeros([q.shape[0], BLOCK_N], dtype=tl.float32)
        scores = product(q, tl.trans(k.to(q.dtype)), zero, PRECISION, WIDENED)
        if HAS_SCALES:
            scores *= load_scales(
                key_scales, blocks, kv_head, start, low, last, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N
            )[None, :]
        # What makes a score of a product is left to the fused multiply-add before the exponential.
        factor = scale
        if HAS_CAP:
            # cap * tanh(score / cap), from an exponential that may overflow to infinity or vanish
            factor = soft_cap * 1.4426950408889634
            scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * 1.4426950408889634 / soft_cap)) + 1.0)
        if MASKED:
            n = start + tl.arange(0, BLOCK_N)
            is_seen = n[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen &= n[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        shift = new_top
        if MASKED:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        v = load_slots(
            values, blocks, kv_head, start, low, last, MASKED,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, USE_TMA,
        )  # fmt: skip
        if HAS_SCALES:
            weights *= load_scales(
                value_scales, blocks, kv_head, start, low, last, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N
            )[None, :]
        acc = product(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], PRECISION, WIDENED)
        top = new_top
        blocks = load_blocks(table, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N, USE_TMA)
    return acc, top, total
