"""Attention over the paged KV pool with native operators, read from its blocks without a copy.

Owns a step's plan. Slots that were never written are not read into a result.
Called on the step thread.
"""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.native.operators import NativeOps
from engine.native.plan import AttentionPlan, plan_attention


class NativePagedAttention:
    """An attention backend; see `engine.attention.AttentionBackend`."""

    def __init__(self, ops: NativeOps, pool: torch.Tensor, num_heads: int) -> None:
        """`pool` is `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, contiguous fp32."""
        self._ops = ops
        self._pool = pool
        self._heads_per_kv_head = num_heads // pool.shape[3]

    def plan(self, batch: Batch) -> NativeAttentionStep:
        return NativeAttentionStep(self._ops, self._pool, plan_attention(batch, self._heads_per_kv_head))


class NativeAttentionStep:
    """One step's plan over `pool`: read by `NativeLayers`, or run layer by layer like any other."""

    def __init__(self, ops: NativeOps, pool: torch.Tensor, plan: AttentionPlan) -> None:
        self.pool = pool
        self.plan = plan
        self._ops = ops

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `engine.model.layers.Attention`."""
        keys, values = self.pool[layer_index].unbind(0)
        blocks = torch.from_numpy(self.plan.token_blocks)
        offsets = torch.from_numpy(self.plan.token_offsets)
        keys[blocks, :, offsets] = k
        values[blocks, :, offsets] = v
        return self._ops.attention(q, keys, values, self.plan)
