"""The twins: every kernel of this folder's attention in plain torch, of the same signature.

Owns what each kernel means: one sequence after the other, all scores at once, in fp32 or wider. Slow and
plain on purpose; tests compare with it. Any thread.
"""

from __future__ import annotations

import math

import torch

from engine.kernels.kv_write import Rotation, largest
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.tables import AttentionTiles
from engine.kernels.work import DecodeWork, PrefillWork


def prefill_attention(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    work: PrefillWork,
    rule: AttentionRule,
    tiles: AttentionTiles,
) -> None:
    for sequence, first, start, num_new, context in work.tiles.tolist():
        if first == 0:  # the other tiles of a sequence are done with its first
            _attend(q, kv, out, work.tables[sequence], start, num_new, context, rule)


def decode_attention(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    work: DecodeWork,
    rule: AttentionRule,
    tiles: AttentionTiles,
) -> None:
    for sequence, split, start, num_new, context in work.items[: int(work.num_items)].tolist():
        if split == 0:
            _attend(q, kv, out, work.tables[sequence], start, num_new, context, rule)


def kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    rotation: Rotation,
) -> None:
    stored = k.double()
    if rotation.changes_queries:
        q.copy_(_rotate(q.double(), rotation.q_weight, rotation))
        stored = _rotate(stored, rotation.k_weight, rotation)
    has_place = slots >= 0
    blocks, offsets = slots[has_place] // kv.block_size, slots[has_place] % kv.block_size
    for vectors, pool, scales in ((stored, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
        vectors = vectors[has_place].float()
        if scales is not None:
            scale = vectors.abs().amax(-1) / largest(pool.dtype)
            scales[blocks, :, offsets] = scale
            vectors = torch.where(scale.unsqueeze(-1) > 0, vectors / scale.unsqueeze(-1), 0.0)
            if pool.dtype == torch.int8:
                vectors = torch.floor(vectors + 0.5)
        pool[blocks, :, offsets] = vectors.to(pool.dtype)


def _rotate(heads: torch.Tensor, weight: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
    """`heads [num_tokens, num_heads, head_dim]`, fp64."""
    if weight is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + rotation.eps) * weight
    if rotation.cos is None or rotation.sin is None:
        return heads
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    table: torch.Tensor,
    start: int,
    num_new: int,
    context: int,
    rule: AttentionRule,
) -> None:
    """New tokens `start : start + num_new`, which follow `context` others of their sequence."""
    length = context + num_new
    low = max(0, context + 1 - rule.window) if rule.window else 0  # no token sees a key below
    keys = _gather(kv.keys, kv.key_scales, table, length)[:, low:]
    values = _gather(kv.values, kv.value_scales, table, length)[:, low:]
    queries = q[start : start + num_new].double().transpose(0, 1)  # [num_heads, num_new, head_dim]
    group = queries.shape[0] // kv.num_kv_heads
    scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * rule.scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    distance = torch.arange(context, length)[:, None] - torch.arange(low, length)
    is_hidden = distance < 0
    if rule.window:
        is_hidden |= distance >= rule.window
    weights = torch.softmax(scores.masked_fill(is_hidden.to(q.device), -math.inf), dim=-1)
    mixed = weights @ values.repeat_interleave(group, 0)
    out[start : start + num_new] = mixed.transpose(0, 1).to(out.dtype)


def _gather(
    pool: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, length: int
) -> torch.Tensor:
    """The first `length` slots of a sequence: fp64 `[num_kv_heads, length, head_dim]`."""
    num_blocks = -(-length // pool.shape[2])
    blocks = table[:num_blocks].long()
    slots = pool[blocks].double()
    if scales is not None:
        slots = slots * scales[blocks].double().unsqueeze(-1)
    return slots.transpose(0, 1).flatten(1, 2)[:, :length]
