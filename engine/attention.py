"""Attention over the paged KV pool in plain torch.

Owns how keys and values are stored at their slots and how queries attend to them. A step is planned once
(indices, masks) and run per layer. Slots that were never written are never read into a result: whatever they
hold, NaN included, is cut off or replaced before it can meet a weight of 0. Called on the step thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Batch, Ints

# Up to this many new tokens (decodes, verified drafts) sequences are padded to one context length and run
# together; longer chunks run one by one.
_MAX_GROUPED_TOKENS = 16
# Padded blocks that one group may carry: gathering this many costs about as much as the calls of another
# group.
_MAX_PADDED_BLOCKS = 24


class AttentionBackend(Protocol):
    """Chosen once at start; makes one plan per step."""

    def plan(self, batch: Batch) -> PlannedAttention: ...


class PlannedAttention(Protocol):
    """What a layer calls; see `engine.model.layers.Attention`."""

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class TorchPagedAttention:
    """The backend for CPUs, and the reference for kernels."""

    def __init__(self, pool: torch.Tensor, num_heads: int) -> None:
        """`pool` is `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, contiguous."""
        num_layers, _, num_blocks, num_kv_heads, block_size, head_dim = pool.shape
        self._shape = _Shape(num_heads, num_kv_heads, num_blocks, block_size, head_dim)
        self._device = pool.device
        # One layer as rows of a slot (to write) and as rows of a block (to read), per head, keys before
        # values.
        self._slots = pool.view(num_layers, -1, head_dim).unbind(0)
        self._blocks = pool.view(num_layers, -1, block_size * head_dim).unbind(0)

    def plan(self, batch: Batch) -> TorchAttentionStep:
        """Indices and masks of a step, shared by all layers."""
        shape, device = self._shape, self._device
        parts = [_plan_part(batch, first, last, shape, device) for first, last in _ranges(batch, shape)]
        return TorchAttentionStep(self._slots, self._blocks, _slot_rows(batch, shape).to(device), parts)


@dataclass(frozen=True, slots=True)
class _Shape:
    num_heads: int
    num_kv_heads: int
    num_blocks: int
    block_size: int
    head_dim: int

    def block_rows(self, tables: Ints) -> Ints:
        """`[n, m]` block ids to rows of `_blocks`: `[2, n, num_kv_heads, m]`."""
        kv_start = np.array([0, self.num_blocks * self.num_kv_heads])[:, None, None, None]
        return kv_start + tables[:, None, :] * self.num_kv_heads + np.arange(self.num_kv_heads)[:, None]


class TorchAttentionStep:
    """One step's plan; `run` is called once for each layer, in order."""

    def __init__(
        self,
        slots: tuple[torch.Tensor, ...],
        blocks: tuple[torch.Tensor, ...],
        slot_rows: torch.Tensor,
        parts: list[_Group | _Chunk],
    ) -> None:
        self._slots = slots
        self._blocks = blocks
        self._key_rows, self._value_rows = slot_rows.unbind(0)  # [num_tokens * num_kv_heads] each
        self._parts = parts

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store `k`, `v [num_tokens, num_kv_heads, head_dim]`, attend with `q`; returns the shape of `q`."""
        head_dim = q.shape[-1]
        slots, blocks = self._slots[layer_index], self._blocks[layer_index]
        slots.index_copy_(0, self._key_rows, k.reshape(-1, head_dim))
        slots.index_copy_(0, self._value_rows, v.reshape(-1, head_dim))
        if len(self._parts) == 1:
            return self._parts[0].attend(blocks, q)
        return torch.cat([part.attend(blocks, q[part.first : part.last]) for part in self._parts])


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally few new tokens, padded to one length: two batched products per layer."""

    first: int  # tokens `first : last` of the step
    last: int
    num_sequences: int
    shape: _Shape
    block_rows: torch.Tensor  # [2 * num_sequences * num_kv_heads * num_blocks]
    unwritten: torch.Tensor  # rows of the gathered slots that lie beyond their sequence
    mask: torch.Tensor  # [num_sequences * num_kv_heads, 1 or num_queries, num_slots], 0 or -inf

    def attend(self, blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        shape, count = self.shape, self.num_sequences
        num_tokens, num_heads, head_dim = q.shape
        per_kv_head = num_heads // shape.num_kv_heads
        gathered = blocks.index_select(0, self.block_rows).view(-1, head_dim)
        gathered.index_fill_(0, self.unwritten, 0.0)
        keys, values = gathered.view(2, count * shape.num_kv_heads, -1, head_dim).unbind(0)
        # [sequence, new token, KV head, query head of it, dim] -> [sequence * KV head, queries, dim]
        grouped = q.reshape(count, -1, shape.num_kv_heads, per_kv_head, head_dim).transpose(1, 2)
        queries = grouped.reshape(count * shape.num_kv_heads, -1, head_dim)
        scores = torch.baddbmm(self.mask, queries, keys.transpose(1, 2), alpha=head_dim**-0.5)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        per_token = mixed.view(count, shape.num_kv_heads, -1, per_kv_head, head_dim).transpose(1, 2)
        return per_token.reshape(num_tokens, num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with many new tokens: fused attention, which never holds the whole score matrix."""

    first: int
    last: int
    num_slots: int  # context and new tokens
    shape: _Shape
    block_rows: torch.Tensor  # [2 * num_kv_heads * num_blocks]
    mask: torch.Tensor | None  # [num_new, num_slots], 0 or -inf; None: causal from the first token

    def attend(self, blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        head_dim = q.shape[-1]
        gathered = blocks.index_select(0, self.block_rows).view(2, 1, self.shape.num_kv_heads, -1, head_dim)
        keys, values = gathered[:, :, :, : self.num_slots].unbind(0)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1)


def _slot_rows(batch: Batch, shape: _Shape) -> torch.Tensor:
    """Rows of `_slots` that the new keys (first) and values go to: `[2, num_tokens * num_kv_heads]`."""
    rows = shape.block_rows(batch.token_blocks[:, None])  # [2, num_tokens, num_kv_heads, 1]
    rows = rows * shape.block_size + batch.token_offsets[:, None, None]
    return torch.from_numpy(rows.reshape(2, -1))


def _ranges(batch: Batch, shape: _Shape) -> list[tuple[int, int]]:
    """Cut the sequences, which the batch has sorted, into runs that are attended to together."""
    num_blocks = (-(-(batch.num_context + batch.num_new) // shape.block_size)).tolist()
    num_new = batch.num_new.tolist()
    ranges: list[tuple[int, int]] = []
    first, padded = 0, 0
    for row in range(1, len(num_new) + 1):
        if row < len(num_new) and num_new[row] == num_new[first] <= _MAX_GROUPED_TOKENS:
            padded += num_blocks[first] - num_blocks[row]  # sorted: the first is the longest
            if padded <= _MAX_PADDED_BLOCKS:
                continue
        ranges.append((first, row))
        first, padded = row, 0
    return ranges


def _plan_part(batch: Batch, first: int, last: int, shape: _Shape, device: torch.device) -> _Group | _Chunk:
    num_new = int(batch.num_new[first])
    lengths = batch.num_context[first:last] + num_new
    num_blocks = -(-int(lengths.max()) // shape.block_size)
    block_rows = shape.block_rows(batch.block_tables[first:last, :num_blocks])
    tokens = int(batch.starts[first]), int(batch.starts[first]) + num_new * (last - first)
    rows = torch.from_numpy(block_rows.reshape(-1)).to(device)
    if num_new > _MAX_GROUPED_TOKENS:
        num_slots = int(lengths[0])
        mask = None if num_slots == num_new else _causal_mask(num_new, num_slots, device)
        return _Chunk(*tokens, num_slots, shape, rows, mask)
    num_slots = num_blocks * shape.block_size
    is_beyond = np.arange(num_slots) >= lengths[:, None]  # [num_sequences, num_slots]
    by_head = np.broadcast_to(is_beyond[None, :, None], (2, last - first, shape.num_kv_heads, num_slots))
    unwritten = torch.from_numpy(np.flatnonzero(by_head)).to(device)
    mask = _group_mask(lengths, num_new, num_slots, shape).to(device)
    return _Group(*tokens, last - first, shape, rows, unwritten, mask)


def _group_mask(lengths: Ints, num_new: int, num_slots: int, shape: _Shape) -> torch.Tensor:
    """New token i sees all slots up to its own; of a decode, one mask row serves all query heads."""
    visible = lengths[:, None] - num_new + 1 + np.arange(num_new)  # [num_sequences, num_new]
    is_hidden = np.arange(num_slots) >= visible[:, :, None]
    mask = np.where(is_hidden, np.float32(-math.inf), np.float32(0.0))
    per_kv_head = 1 if num_new == 1 else shape.num_heads // shape.num_kv_heads
    mask = np.repeat(np.repeat(mask, per_kv_head, axis=1), shape.num_kv_heads, axis=0)
    return torch.from_numpy(mask)


def _causal_mask(num_new: int, num_slots: int, device: torch.device) -> torch.Tensor:
    return torch.full((num_new, num_slots), -math.inf, device=device).triu_(num_slots - num_new + 1)
