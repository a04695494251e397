"""Gated activations over a fused projection: SwiGLU and GeGLU, one read and one write.

Owns the kernel, its launch and its twin. Elementwise: a value depends on its own gate and up value only.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import inlined, kernel

_BLOCK = 1024
_NUM_WARPS = 4


class Activation(StrEnum):
    """What is applied to the gate: Shazeer, arXiv 2002.05202; Hendrycks and Gimpel, arXiv 1606.08415."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu"


@inlined
def _sigmoid(x: tl.tensor) -> tl.tensor:
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@kernel()
def _gated(
    gate_up: tl.pointer_type,  # [num_tokens, 2 * SIZE]
    out: tl.pointer_type,  # [num_tokens, SIZE]
    stride: tl.tensor,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate *= _sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 is the sigmoid of 2 z; 1.59… is 2 sqrt(2 / pi)
        gate *= _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + token * SIZE + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up` of `[num_tokens, 2 * size]`, gate first: `[num_tokens, size]`, contiguous.

    Arithmetic is float32; one rounding at the end.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * size
    assert gate_up.stride(1) == 1
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens > 0:
        _gated[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            ACTIVATION=activation.value,
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    return out


def gated_activation_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The twin of `gated_activation` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation is Activation.SILU:
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none")
    return (gate * up).to(gate_up.dtype)


def builds(arch: int) -> list[KernelBuild]:
    """The kernel for each activation at the width of an 8B model."""
    del arch  # bound by memory, alike everywhere
    return [
        KernelBuild(
            name=f"gated {activation.value}",
            kernel=_gated,
            signature={"gate_up": "*bf16", "out": "*bf16", "stride": "i32"},
            constexprs={"ACTIVATION": activation.value, "SIZE": 14336, "BLOCK": _BLOCK},
            options={"num_warps": _NUM_WARPS, "enable_fp_fusion": True},
            aligned=frozenset({"stride"}),
            is_sample=activation is Activation.SILU,
        )
        for activation in Activation
    ]
