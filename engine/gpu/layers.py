"""All decoder layers in one call: Triton kernels around torch's matrix products.

Owns the order of operations inside a layer. The residual stream is fp32; what is multiplied is in the
weights' precision; additions and norms are fused across the border of two blocks. Called on the step thread;
holds weights, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.activation import Activation, gated_activation
from engine.kernels.attention import TritonAttentionStep
from engine.kernels.kv_write import Rotation
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.model.config import ModelConfig
from engine.model.layers import Attention
from engine.model.linear import Linear, LinearFactory
from engine.model.rope import RopeRows
from engine.model.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TritonLayers:
    """The layers of a model; changes the residual stream in place."""

    def __init__(self, config: ModelConfig, weights: Weights, linears: LinearFactory) -> None:
        self._config = config
        self._layers = [_layer(config, index, weights, linears) for index in range(config.num_layers)]
        self._dtype = self._layers[0].input_norm.dtype

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> None:
        """`hidden [num_tokens, hidden_size]`, fp32 and contiguous."""
        assert isinstance(attention, TritonAttentionStep), "Triton layers need the Triton attention backend"
        config = self._config
        num_tokens, eps = hidden.shape[0], config.rms_norm_eps
        first_kv = config.num_heads + config.num_kv_heads
        cos, sin = rope.cos.squeeze(1), rope.sin.squeeze(1)
        x = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
        rms_norm(hidden, self._layers[0].input_norm, eps, out=x)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = add_rms_norm(x, hidden, layer.input_norm, eps)
            heads = layer.qkv(x).view(num_tokens, -1, config.head_dim)
            mixed = attention.run_rotated(
                index,
                heads[:, : config.num_heads],
                heads[:, config.num_heads : first_kv],
                heads[:, first_kv:],
                Rotation(cos, sin, layer.q_norm, layer.k_norm, eps),
            )
            x = layer.output(mixed.view(num_tokens, -1))
            x = add_rms_norm(x, hidden, layer.post_norm, eps)
            x = layer.down(gated_activation(layer.gate_up(x), Activation.SILU))
        hidden.add_(x)


def _layer(config: ModelConfig, index: int, weights: Weights, linears: LinearFactory) -> _Layer:
    prefix = f"layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    has_norm = config.has_qk_norm
    return _Layer(
        input_norm=weights[f"{prefix}.input_layernorm.weight"],
        qkv=linears([f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")]),
        q_norm=weights[f"{attention}.q_norm.weight"] if has_norm else None,
        k_norm=weights[f"{attention}.k_norm.weight"] if has_norm else None,
        output=linears([f"{attention}.o_proj"]),
        post_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=linears([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
        down=linears([f"{mlp}.down_proj"]),
    )
