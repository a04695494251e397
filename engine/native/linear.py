"""Native linear layers: weights in the checkpoint's own precision, packed once, multiplied in fp32.

Owns the choice of what is packed: the 4-bit and 8-bit blocks that are kept beside a converted checkpoint, or
else the stored weight in 16 or 32 bits. Both give the values of the fp32 weight exactly. Called on the step
thread; stateless after construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import InvalidConfig
from engine.model.names import BLOCKS_FILE
from engine.model.weights import Weights
from engine.native.operators import NativeOps
from engine.native.packed_store import Store
from engine.native.packing import PackedWeight, QuantizedWeight, pack_blocks, pack_dense


class NativeLinear:
    """`x [num_rows, num_in] -> [num_rows, num_out]`, fp32; the bias, if any, is inside."""

    def __init__(self, ops: NativeOps, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        self._multiply = ops.linear
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.weight, self.bias)


class NativeLinears:
    """A `LinearFactory`; see `engine.model.linear`. `num_bytes` counts the packed weights of its layers."""

    def __init__(self, ops: NativeOps, weights: Weights, folder: Path, store: Store) -> None:
        """`folder` is the checkpoint's, looked into for quantization blocks."""
        self._ops = ops
        self._weights = weights
        self._blocks = StoredBlocks(folder)
        self._store = store
        self.num_bytes = 0

    def __call__(self, names: Sequence[str]) -> NativeLinear:
        packed = self._store.weight("+".join(names), partial(self._packed, names))
        self.num_bytes += packed.num_bytes
        biases = [self._weights[f"{name}.bias"] for name in names if f"{name}.bias" in self._weights]
        assert len(biases) in (0, len(names)), f"{names}: some of the fused modules have a bias, some do not"
        return NativeLinear(self._ops, packed, torch.cat(biases) if biases else None)

    def _packed(self, names: Sequence[str]) -> PackedWeight:
        found = [self._blocks.weight(f"{name}.weight") for name in names]
        blocks = [weight for weight in found if weight is not None]
        if len(blocks) == len(names) and len({weight.minimum is None for weight in blocks}) == 1:
            return pack_blocks(_joined(blocks))
        return pack_dense(torch.cat([self._weights[f"{name}.weight"] for name in names]))


class StoredBlocks:
    """The quantized weights of a checkpoint's folder, by canonical name; none if it has no such file."""

    def __init__(self, folder: Path) -> None:
        file = folder / BLOCKS_FILE
        self._handle: Any = _open(file) if file.exists() else None
        self._names: frozenset[str] = frozenset()
        if self._handle is not None:
            self._names = frozenset(self._handle.keys())

    def weight(self, name: str) -> QuantizedWeight | None:
        """`name` without the prefix `model.`, such as `layers.0.mlp.up_proj.weight`."""
        stored = name if f"{name}.q" in self._names else f"model.{name}"
        if f"{stored}.q" not in self._names:
            return None
        minimum = f"{stored}.min"
        return QuantizedWeight(
            self._handle.get_tensor(f"{stored}.q"),
            self._handle.get_tensor(f"{stored}.scale"),
            self._handle.get_tensor(minimum) if minimum in self._names else None,
        )


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"{file} is not a readable safetensors file: {error}", key=file.name) from error


def _joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    minima = [weight.minimum for weight in weights if weight.minimum is not None]
    return QuantizedWeight(
        torch.cat([weight.q for weight in weights]),
        torch.cat([weight.scale for weight in weights]),
        torch.cat(minima) if minima else None,
    )
