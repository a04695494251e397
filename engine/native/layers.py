"""All decoder layers in one call: the arithmetic of `engine.model.layers` in native operators.

Owns the description of the layers that the library reads, and the memory of a step. The order of operations
inside a layer is `layers` in `kernels.h`. Called on the step thread; holds weights, no state.
"""

from __future__ import annotations

import ctypes

import torch

from engine.model.config import ModelConfig
from engine.model.layers import Attention
from engine.model.rope import RopeRows
from engine.model.weights import Weights
from engine.native.attention import NativeAttentionStep
from engine.native.linear import NativeLinear, NativeLinears
from engine.native.operators import LayerFields, MatrixFields, NativeOps, PassFields


class NativeLayers:
    """The layers of a model; changes the residual stream in place."""

    def __init__(self, ops: NativeOps, config: ModelConfig, weights: Weights, linears: NativeLinears) -> None:
        self._ops = ops
        self._config = config
        self._kept: list[object] = []  # what the pointers in the fields point to
        self._fields = (LayerFields * config.num_layers)()
        for index in range(config.num_layers):
            self._fill(self._fields[index], f"layers.{index}", weights, linears)

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> None:
        """`hidden [num_tokens, hidden_size]`, fp32 and contiguous."""
        assert isinstance(attention, NativeAttentionStep), "native layers need the native attention backend"
        config, plan, pool = self._config, attention.plan, attention.pool
        num_tokens = hidden.shape[0]
        sizes = (
            config.hidden_size,
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            config.num_heads * config.head_dim,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        memory = [torch.empty(num_tokens * size) for size in sizes]
        self._ops.layers(
            PassFields(
                ctypes.addressof(self._fields),
                hidden.data_ptr(),
                rope.cos.data_ptr(),
                rope.sin.data_ptr(),
                pool.data_ptr(),
                plan.tables.ctypes.data,
                plan.items.ctypes.data,
                plan.groups.ctypes.data,
                plan.token_blocks.ctypes.data,
                plan.token_offsets.ctypes.data,
                *(part.data_ptr() for part in memory),
                config.num_layers,
                num_tokens,
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                pool.shape[2],
                pool.shape[4],
                plan.tables.shape[1],
                len(plan.items),
                len(plan.groups),
                torch.get_num_threads(),
                config.rms_norm_eps,
            ),
            (hidden, rope.cos, rope.sin, pool),
        )

    def _fill(self, fields: LayerFields, prefix: str, weights: Weights, linears: NativeLinears) -> None:
        fields.input_norm = self._pointer(weights[f"{prefix}.input_layernorm.weight"])
        fields.post_norm = self._pointer(weights[f"{prefix}.post_attention_layernorm.weight"])
        if self._config.has_qk_norm:
            fields.q_norm = self._pointer(weights[f"{prefix}.self_attn.q_norm.weight"])
            fields.k_norm = self._pointer(weights[f"{prefix}.self_attn.k_norm.weight"])
        fields.qkv = self._matrix(
            linears([f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
        )
        fields.output = self._matrix(linears([f"{prefix}.self_attn.o_proj"]))
        fields.gate_up = self._matrix(linears([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]))
        fields.down = self._matrix(linears([f"{prefix}.mlp.down_proj"]))

    def _matrix(self, linear: NativeLinear) -> MatrixFields:
        weight = linear.weight
        bias = None if linear.bias is None else self._pointer(linear.bias)
        self._kept.append(weight)
        return MatrixFields(weight.data.data_ptr(), bias, int(weight.kind), weight.num_out, weight.num_in)

    def _pointer(self, tensor: torch.Tensor) -> int:
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        self._kept.append(tensor)
        return tensor.data_ptr()
