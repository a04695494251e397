"""Linear layers of the device path: torch's matrix products (cuBLAS) in the engine's precision, fp32 logits.

Owns how the head gives fp32 from 16-bit weights without rounding in between. Called on the step thread;
stateless after construction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from core.errors import InvalidConfig
from engine.model.linear import Linear, PlainLinear
from engine.model.weights import Weights

_HEADS = ("embed_tokens", "lm_head")


class HeadLinear:
    """`x [num_rows, hidden_size]`, rounded to the weight's precision, to fp32 logits."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._is_widened = weight.device.type == "cpu" and weight.dtype != torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._weight.dtype)
        if self._weight.dtype == torch.float32:
            return F.linear(x, self._weight)
        if self._is_widened:  # torch has no such product for CPUs; the values are the same
            return F.linear(x.float(), self._weight.float())
        return torch.mm(x, self._transposed, out_dtype=torch.float32)


class DeviceLinears:
    """A `LinearFactory`; see `engine.model.linear`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, names: Sequence[str]) -> Linear:
        if len(names) == 1 and names[0] in _HEADS:
            return HeadLinear(self._weights[f"{names[0]}.weight"])
        parts = [self._weights[f"{name}.weight"] for name in names]
        biases = [self._weights[f"{name}.bias"] for name in names if f"{name}.bias" in self._weights]
        assert len(biases) in (0, len(names)), f"{names}: some of the fused modules have a bias, some do not"
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return PlainLinear(weight, torch.cat(biases) if biases else None)


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidConfig if this torch has no product of 16-bit matrices with an fp32 result."""
    if device.type == "cpu" or dtype == torch.float32:
        return
    probe = torch.ones((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (TypeError, RuntimeError) as error:
        raise InvalidConfig(
            f"torch {torch.__version__} cannot give fp32 logits from {dtype} weights here: {error}",
            key="engine.dtype",
        ) from error
