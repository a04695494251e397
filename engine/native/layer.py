"""The decoder layer made of native operators: the arithmetic of `engine.model.layers` in fewer passes.

Owns the order of operations inside a layer. Norms of q and k, which only some models have, are torch's.
Called on the step thread; holds weights, no state.
"""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.layers import Attention, RMSNorm
from engine.model.rope import RopeRows
from engine.model.weights import Weights
from engine.native.attention import NativeAttentionStep
from engine.native.library import NativeOps
from engine.native.linear import NativeLinears


class NativeDecoderLayer:
    """One layer; changes the residual stream in place."""

    def __init__(
        self, ops: NativeOps, config: ModelConfig, index: int, weights: Weights, linears: NativeLinears
    ) -> None:
        prefix = f"layers.{index}"
        self._ops = ops
        self._index = index
        self._num_heads, self._head_dim, self._eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self._input_norm = weights[f"{prefix}.input_layernorm.weight"]
        self._qkv = linears([f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
        self._output = linears([f"{prefix}.self_attn.o_proj"])
        self._head_norms: list[tuple[slice, RMSNorm]] = []
        if config.has_qk_norm:
            last = config.num_heads + config.num_kv_heads
            for name, heads in (
                ("q_norm", slice(0, config.num_heads)),
                ("k_norm", slice(config.num_heads, last)),
            ):
                norm = RMSNorm(weights[f"{prefix}.self_attn.{name}.weight"], config.rms_norm_eps)
                self._head_norms.append((heads, norm))
        self._post_norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        self._gate_up = linears([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        self._down = linears([f"{prefix}.mlp.down_proj"])

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> None:
        assert isinstance(attention, NativeAttentionStep), "native layers need the native attention backend"
        ops, num_tokens = self._ops, hidden.shape[0]
        heads = self._qkv(ops.rms_norm(hidden, self._input_norm, self._eps))
        heads = heads.view(num_tokens, -1, self._head_dim)
        for part, norm in self._head_norms:
            heads[:, part] = norm(heads[:, part])
        attention.store(self._index, heads, self._num_heads, rope)
        mixed = attention.attend(self._index, heads[:, : self._num_heads])
        self._output.add_to(hidden, mixed.view(num_tokens, -1))
        gate_up = self._gate_up(ops.rms_norm(hidden, self._post_norm, self._eps))
        self._down.add_to(hidden, ops.swiglu(gate_up))
