"""Decoder layers: attention block and feed-forward block, each reading and adding to the residual stream.

Owns the order of operations inside a layer. Where keys and values live and how attention is computed is the
attention backend's business, behind `Attention`. Called on the step thread; holds weights, no state.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.model.config import ModelConfig
from engine.model.linear import LinearFactory
from engine.model.rope import RopeRows
from engine.model.weights import Weights


class Attention(Protocol):
    """What a layer needs of the attention backend, already planned for the tokens of this step."""

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store `k` and `v`, then attend.

        `q [num_tokens, num_heads, head_dim]`, `k` and `v [num_tokens, num_kv_heads, head_dim]`; returns the
        shape of `q`.
        """
        ...


class RMSNorm:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = (weight.shape[0],)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class AttentionBlock:
    """Norm, fused q/k/v projection, optional q/k norm, rotation, attention, output projection."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, linears: LinearFactory) -> None:
        prefix = f"layers.{index}"
        self._index = index
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._norm = RMSNorm(weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        self._qkv = linears([f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
        self._output = linears([f"{prefix}.self_attn.o_proj"])
        self._q_norm: RMSNorm | None = None
        self._k_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self._q_norm = RMSNorm(weights[f"{prefix}.self_attn.q_norm.weight"], config.rms_norm_eps)
            self._k_norm = RMSNorm(weights[f"{prefix}.self_attn.k_norm.weight"], config.rms_norm_eps)

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> torch.Tensor:
        num_tokens = hidden.shape[0]
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(self._norm(hidden)).view(num_tokens, -1, self._head_dim)
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
            qk = torch.cat((self._q_norm(q), self._k_norm(k)), dim=1)
        qk = rope.rotate(qk)
        mixed = attention.run(self._index, qk[:, : self._num_heads], qk[:, self._num_heads :], v)
        return self._output(mixed.reshape(num_tokens, -1))


class FeedForwardBlock:
    """Norm, fused gate and up projection, SwiGLU (Shazeer, arXiv 2002.05202), down projection."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, linears: LinearFactory) -> None:
        prefix = f"layers.{index}"
        self._norm = RMSNorm(weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        self._gate_up = linears([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        self._down = linears([f"{prefix}.mlp.down_proj"])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(self._norm(hidden)).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


class DecoderLayer:
    """One layer; changes the residual stream in place."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, linears: LinearFactory) -> None:
        self._attention = AttentionBlock(config, index, weights, linears)
        self._feed_forward = FeedForwardBlock(config, index, weights, linears)

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> None:
        hidden.add_(self._attention(hidden, rope, attention))
        hidden.add_(self._feed_forward(hidden))
