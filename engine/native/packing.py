"""Packed weights: how a linear layer's weight lies in memory for the native operators.

Owns the layout, which `ops.cpp` reads: outputs in panels of 32 (the last one padded with zeros), and inside a
panel input after input, so that a step reads the memory once and straight through.

- FP32, FP16, BF16: `[panel, input, 32]`, in the checkpoint's own precision.
- Q4_1: per panel and block of 32 inputs 32 scales and 32 minima in fp16, then per input 16 bytes, of which
  byte j holds output j in its low and output j + 16 in its high four bits.
- Q8_0: per panel and block 32 scales in fp16, then per input 32 signed bytes.

Used at start, on the loading thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

PANEL = 32
BLOCK = 32


class WeightKind(IntEnum):
    """The numbers are those of `ops.cpp`."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    Q4_1 = 3
    Q8_0 = 4


_KIND_OF_DTYPE = {
    torch.float32: WeightKind.FP32,
    torch.float16: WeightKind.FP16,
    torch.bfloat16: WeightKind.BF16,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """`data` is uint8 `[num_panels, bytes]`."""

    kind: WeightKind
    num_out: int
    num_in: int
    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight in blocks of 32 inputs as the checkpoint keeps them; see `engine.model.gguf_convert`.

    With `minimum`: Q4_1, `q` uint8 `[num_out, num_in / 32, 16]`; without: Q8_0, `q` int8
    `[num_out, num_in / 32, 32]`. `scale` and `minimum` are fp16 `[num_out, num_in / 32]`.
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None

    def dequantized(self) -> torch.Tensor:
        """The values it stands for, fp32 `[num_out, num_in]`."""
        levels = self.q if self.minimum is None else _levels(self.q)
        values = levels.float() * self.scale.float().unsqueeze(-1)
        if self.minimum is not None:
            values += self.minimum.float().unsqueeze(-1)
        return values.reshape(self.q.shape[0], -1)


def pack_dense(weight: torch.Tensor) -> PackedWeight:
    """`weight [num_out, num_in]` in fp32, fp16 or bf16."""
    num_out, num_in = weight.shape
    panels = _in_panels(weight).transpose(1, 2).contiguous()  # [num_panels, num_in, 32]
    data = panels.view(torch.uint8).reshape(panels.shape[0], -1)
    return PackedWeight(_KIND_OF_DTYPE[weight.dtype], num_out, num_in, data)


def pack_blocks(weight: QuantizedWeight) -> PackedWeight:
    num_out, num_blocks = weight.scale.shape
    levels = weight.q if weight.minimum is None else _levels(weight.q)
    by_input = _in_panels(levels).permute(0, 2, 3, 1)  # [num_panels, num_blocks, 32 inputs, 32 outputs]
    parts = [_bytes_of(weight.scale)]
    if weight.minimum is None:
        kind, q = WeightKind.Q8_0, by_input.contiguous().view(torch.uint8)
    else:
        kind, q = WeightKind.Q4_1, by_input[..., : PANEL // 2] | (by_input[..., PANEL // 2 :] << 4)
        parts.append(_bytes_of(weight.minimum))
    parts.append(q.reshape(*q.shape[:2], -1))
    data = torch.cat(parts, dim=-1)  # [num_panels, num_blocks, bytes of a block]
    return PackedWeight(kind, num_out, num_blocks * BLOCK, data.reshape(data.shape[0], -1))


def _levels(q: torch.Tensor) -> torch.Tensor:
    return torch.cat((q & 15, q >> 4), dim=-1)


def _in_panels(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_out, ...]` to `[num_panels, 32, ...]`."""
    missing = -tensor.shape[0] % PANEL
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
    return tensor.reshape(-1, PANEL, *tensor.shape[1:])


def _bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """fp16 `[num_out, num_blocks]` to uint8 `[num_panels, num_blocks, 64]`."""
    return _in_panels(scales).transpose(1, 2).contiguous().view(torch.uint8)
