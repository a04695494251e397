"""Attention over the paged KV pool with native operators, read from its blocks without a copy.

Owns the pool's views per layer and a step's plan. Slots that were never written are not read into a result.
Called on the step thread.
"""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.model.rope import RopeRows
from engine.native.library import NativeOps
from engine.native.plan import AttentionPlan, plan_attention


class NativePagedAttention:
    """An attention backend; see `engine.attention.AttentionBackend`."""

    def __init__(self, ops: NativeOps, pool: torch.Tensor, num_heads: int) -> None:
        """`pool` is `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, contiguous fp32."""
        self._ops = ops
        self._layers = [(layer[0], layer[1]) for layer in pool.unbind(0)]
        self._heads_per_kv_head = num_heads // pool.shape[3]

    def plan(self, batch: Batch) -> NativeAttentionStep:
        return NativeAttentionStep(self._ops, self._layers, plan_attention(batch, self._heads_per_kv_head))


class NativeAttentionStep:
    """One step's plan; a layer calls `store`, then `attend`, or `run` for both without the rotation."""

    def __init__(
        self, ops: NativeOps, layers: list[tuple[torch.Tensor, torch.Tensor]], plan: AttentionPlan
    ) -> None:
        self._ops = ops
        self._layers = layers
        self._plan = plan

    def store(self, layer_index: int, heads: torch.Tensor, num_heads: int, rope: RopeRows) -> None:
        """Rotate q and k of `heads [num_tokens, num_heads + 2 num_kv_heads, head_dim]`, keep k and v."""
        keys, values = self._layers[layer_index]
        self._ops.rotate_store(heads, num_heads, rope.cos, rope.sin, keys, values, self._plan)

    def attend(self, layer_index: int, q: torch.Tensor) -> torch.Tensor:
        """`q [num_tokens, num_heads, head_dim]`, rotated; returns its shape."""
        return self._ops.attention(q, *self._layers[layer_index], self._plan)

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `engine.model.layers.Attention`."""
        keys, values = self._layers[layer_index]
        blocks = torch.from_numpy(self._plan.token_blocks)
        offsets = torch.from_numpy(self._plan.token_offsets)
        keys[blocks, :, offsets] = k
        values[blocks, :, offsets] = v
        return self.attend(layer_index, q)
