"""Linear layers: how a weight is held and multiplied, behind one Protocol.

Owns the plain and the packed fp32 layers and the choice between them, made once at load. A quantized or
sharded layer is another factory of the same shape. Called on the step thread; stateless after construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.model.weights import Weights

# The number of rows that packed weights are laid out for. oneDNN picks a blocked layout from it; the one for
# 64 rows is the best or within a few per cent of it from 1 to 512 rows, the one for 1 row is up to 4 times
# slower for more.
_PACKED_FOR_ROWS = 64


class Linear(Protocol):
    """`x [num_rows, num_in] -> [num_rows, num_out]`; the bias, if any, is inside."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class LinearFactory(Protocol):
    """Makes the layer for one or several modules that read the same input, fused along the output.

    `names` are canonical module names such as `layers.0.self_attn.q_proj`, in the order of the output's
    columns.
    """

    def __call__(self, names: Sequence[str]) -> Linear: ...


class PlainLinear:
    """The layer as torch has it; works on every device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """fp32 on CPU, the weight laid out in blocks beforehand by oneDNN: 2 to 5 times as fast as unpacked."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return out


class DenseLinears:
    """The factory for fp32 weights: packed where this build of torch can, plain elsewhere."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        is_on_cpu = all(tensor.device.type == "cpu" for tensor in weights.values())
        self._kind = PackedLinear if is_on_cpu and can_pack() else PlainLinear

    def __call__(self, names: Sequence[str]) -> Linear:
        weight = _joined([self._weights[f"{name}.weight"] for name in names])
        biases = [self._weights[f"{name}.bias"] for name in names if f"{name}.bias" in self._weights]
        assert len(biases) in (0, len(names)), f"{names}: some of the fused modules have a bias, some do not"
        return self._kind(weight, _joined(biases) if biases else None)


def can_pack() -> bool:
    """Whether this build of torch has the packed fp32 multiplication."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
