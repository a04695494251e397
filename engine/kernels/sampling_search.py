"""Selection without sorting: which token of a row is the last that a count or a mass lets in.

Owns the device functions that top-k, top-p and the best log-probabilities are made of. A token's *depth* is
how far its scaled logit lies below the best one; the bits of a float ≥ 0 order as the float does, so the
depth is found bit by bit, the highest first (a radix select), each pass asking how much lies above a
candidate. First the few tokens that can matter are gathered, so that most passes are short.

Every sum is over one row, in tiles of one size, lane by lane from the first tile on and then across lanes:
its value does not depend on the batch. Tokens at the last depth itself are let in from the lowest id on.
"""

from __future__ import annotations

import triton.language as tl

from engine.kernels.jit import inlined

OUTSIDE = tl.constexpr(0xFFFFFFFF)  # deeper than any token, infinite depth included


@inlined
def depth_bits(
    scores: tl.pointer_type, ids: tl.tensor, inside: tl.tensor, best: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Depth of each token of the row at `scores`, as uint32; OUTSIDE where not `inside`."""
    value = tl.load(scores + ids, mask=inside, other=float("-inf"))
    depth = tl.abs(tl.div_rn(value - best, temperature))
    return tl.where(inside, depth.to(tl.uint32, bitcast=True), OUTSIDE)


@inlined
def weight(bits: tl.tensor, by_count: tl.tensor) -> tl.tensor:
    """What a token adds: one, or its mass relative to the best token's."""
    mass = tl.exp(-tl.where(bits == OUTSIDE, 0, bits).to(tl.float32, bitcast=True))
    return tl.where(by_count, 1.0, mass)


@inlined
def horizon(
    scores: tl.pointer_type,
    best: tl.tensor,
    temperature: tl.tensor,
    by_count: tl.tensor,
    target: tl.tensor,  # a count, or a share of the mass
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A depth above which enough tokens lie, as bits, and the weight of the whole row.

    Tried are 4, 8 and 16 in units of what is compared: scaled logits for a mass, plain ones for a count.
    """
    unit = tl.where(by_count, tl.div_rn(4.0, tl.minimum(temperature, 1.0)), 4.0)
    near, middle = tl.full([TILE], 0.0, tl.float32), tl.full([TILE], 0.0, tl.float32)
    far, all_ = tl.full([TILE], 0.0, tl.float32), tl.full([TILE], 0.0, tl.float32)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        bits = depth_bits(scores, ids, ids < VOCAB, best, temperature)
        depth = bits.to(tl.float32, bitcast=True)  # NaN outside: never less
        added = tl.where(ids < VOCAB, weight(bits, by_count), 0.0)
        near += tl.where(depth < unit, added, 0.0)
        middle += tl.where(depth < 2 * unit, added, 0.0)
        far += tl.where(depth < 4 * unit, added, 0.0)
        all_ += added
    total = tl.sum(all_, axis=0)
    # sums in another order differ in their last bits: a border that is only just enough is not taken
    need = tl.where(by_count, target, target * total * (1 + 1e-5))
    border = tl.full((), float("inf"), tl.float32)
    border = tl.where(tl.sum(far, axis=0) >= need, 4 * unit, border)
    border = tl.where(tl.sum(middle, axis=0) >= need, 2 * unit, border)
    border = tl.where(tl.sum(near, axis=0) >= need, unit, border)
    bits = tl.where(border < float("inf"), border.to(tl.uint32, bitcast=True), OUTSIDE)
    return bits, total


@inlined
def gather(
    scores: tl.pointer_type,
    best: tl.tensor,
    temperature: tl.tensor,
    border: tl.tensor,
    found: tl.pointer_type,  # int32 [VOCAB]
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Write the depths above `border` to `found`, by id, and return how many there are."""
    num = 0
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        bits = depth_bits(scores, ids, ids < VOCAB, best, temperature)
        is_near = (bits < border).to(tl.int32)
        num_near = tl.sum(is_near, axis=0)
        if num_near > 0:
            places = num + tl.cumsum(is_near, axis=0) - is_near
            tl.store(found + places, bits.to(tl.int32, bitcast=True), mask=is_near > 0)
        num += num_near
    tl.debug_barrier()  # what one thread wrote, others read
    return num


@inlined
def search(
    found: tl.pointer_type,
    num: tl.tensor,
    by_count: tl.tensor,
    target: tl.tensor,
    limit: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The greatest depth, at most `limit`, above which less than `target` lies, and how much lies there."""
    depth = tl.full((), 0, tl.uint32)
    above = tl.full((), 0.0, tl.float32)
    bit = tl.full((), 1 << 30, tl.uint32)  # the sign's bit is never set
    for _ in range(31):
        deeper = depth + bit
        added = tl.full([TILE], 0.0, tl.float32)
        for start in range(0, num, TILE):
            lanes = start + tl.arange(0, TILE)
            bits = tl.load(found + lanes, mask=lanes < num, other=-1).to(tl.uint32, bitcast=True)
            # `weight` without its guard: what is OUTSIDE (-1) is above no candidate
            mass = tl.where(by_count, 1.0, tl.exp(-bits.to(tl.float32, bitcast=True)))
            added += tl.where(bits < deeper, mass, 0.0)
        above_deeper = tl.sum(added, axis=0)
        if (deeper <= limit) & (above_deeper < target):
            depth = deeper
            above = above_deeper
        bit = bit >> 1
    return depth, above


@inlined
def measure(
    found: tl.pointer_type,
    num: tl.tensor,
    depth: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many tokens lie at `depth` exactly, and the mass of those above it."""
    at, mass = tl.full([TILE], 0, tl.int32), tl.full([TILE], 0.0, tl.float32)
    for start in range(0, num, TILE):
        lanes = start + tl.arange(0, TILE)
        bits = tl.load(found + lanes, mask=lanes < num, other=-1).to(tl.uint32, bitcast=True)
        at += (bits == depth).to(tl.int32)
        mass += tl.where(bits < depth, tl.exp(-bits.to(tl.float32, bitcast=True)), 0.0)
    return tl.sum(at, axis=0), tl.sum(mass, axis=0)


@inlined
def last_of_equals(
    scores: tl.pointer_type,
    best: tl.tensor,
    temperature: tl.tensor,
    depth: tl.tensor,
    num: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The id of the `num`-th token at `depth`."""
    last, seen = tl.full((), VOCAB, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        is_equal = (depth_bits(scores, ids, ids < VOCAB, best, temperature) == depth).to(tl.int32)
        num_equal = tl.sum(is_equal, axis=0)
        if (seen < num) & (seen + num_equal >= num):
            rank = seen + tl.cumsum(is_equal, axis=0)
            last = tl.sum(tl.where((rank == num) & (is_equal > 0), ids, 0), axis=0)
        seen += num_equal
    return last
