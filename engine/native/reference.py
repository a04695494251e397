"""The twins: every native operator in plain torch, of the same signature.

Owns what each operator means. Slow and plain on purpose; tests compare with it. Any thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.native.packing import BLOCK, PANEL, PackedWeight, WeightKind
from engine.native.plan import AttentionPlan

_DTYPES = {
    WeightKind.FP32: torch.float32,
    WeightKind.FP16: torch.float16,
    WeightKind.BF16: torch.bfloat16,
}


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The weight's values, fp32 `[num_out, num_in]`."""
    num_panels = weight.data.shape[0]
    if weight.kind in _DTYPES:
        panels = weight.data.view(_DTYPES[weight.kind]).view(num_panels, weight.num_in, PANEL).float()
        return panels.transpose(1, 2).reshape(-1, weight.num_in)[: weight.num_out]
    blocks = weight.data.view(num_panels, weight.num_in // BLOCK, -1)
    halves = blocks[..., : 4 * PANEL].contiguous().view(torch.float16).float()
    scale = halves[..., :PANEL].unsqueeze(2)
    if weight.kind == WeightKind.Q4_1:
        q = blocks[..., 4 * PANEL :].reshape(*blocks.shape[:2], BLOCK, PANEL // 2)
        values = torch.cat((q & 15, q >> 4), dim=-1).float() * scale + halves[..., PANEL:].unsqueeze(2)
    else:
        q = blocks[..., 2 * PANEL :].contiguous().view(torch.int8).reshape(*blocks.shape[:2], BLOCK, PANEL)
        values = q.float() * scale
    return values.permute(0, 3, 1, 2).reshape(-1, weight.num_in)[: weight.num_out]


class ReferenceOps:
    """See `engine.native.operators.NativeOps` for shapes."""

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = F.linear(x, unpack(weight), bias)
        return out if added_to is None else added_to.add_(out)

    def attention(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        out = torch.empty(q.shape)
        block_size = keys.shape[2]
        for sequence, token, count, position, split, _ in plan.items.tolist():
            if split > 0:
                continue  # the first split's item names all rows of its group
            length = position + count
            table = torch.from_numpy(plan.tables[sequence, : -(-length // block_size)])
            k, v = (pool[table].transpose(0, 1).flatten(1, 2)[:, :length] for pool in (keys, values))
            is_seen = torch.arange(length) <= position + torch.arange(count)[:, None]
            mixed = F.scaled_dot_product_attention(
                q[token : token + count].transpose(0, 1)[None], k[None], v[None], is_seen, enable_gqa=True
            )
            out[token : token + count] = mixed[0].transpose(0, 1)
        return out

    def rotate_store(
        self,
        heads: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        num_kv_heads, half = keys.shape[1], heads.shape[2] // 2
        cos, sin = cos.view(-1, 1, half), sin.view(-1, 1, half)
        rotated = heads[:, : num_heads + num_kv_heads]
        first, second = rotated[..., :half].clone(), rotated[..., half:].clone()
        rotated[..., :half] = first * cos - second * sin
        rotated[..., half:] = second * cos + first * sin
        blocks, offsets = torch.from_numpy(plan.token_blocks), torch.from_numpy(plan.token_offsets)
        keys[blocks, :, offsets] = heads[:, num_heads : num_heads + num_kv_heads]
        values[blocks, :, offsets] = heads[:, num_heads + num_kv_heads :]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
