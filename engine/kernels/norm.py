"""Root mean square normalisation, alone or with the residual added first, in one pass over the data.

Owns the kernel, its launch and its twin. The same code normalises hidden states and single heads of queries
and keys. A row's result depends on that row only, bit for bit: its tile is chosen by the row's length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.build import KernelBuild
from engine.kernels.jit import kernel

_TILE = 1024  # short rows share a program until it has this many elements


@kernel(varying=("num_rows",))
def _rms_norm(
    x: tl.pointer_type,  # [num_tokens, num_heads, size]
    residual: tl.pointer_type,  # [num_tokens, size], updated; only with HAS_RESIDUAL
    weight: tl.pointer_type,  # [size]
    out: tl.pointer_type,  # [num_tokens, num_heads, size]
    num_rows: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    token, head = rows // NUM_HEADS, rows % NUM_HEADS

    values = tl.load(
        x + (token * x_token_stride + head * x_head_stride)[:, None] + columns[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual + (rows * residual_stride)[:, None] + columns[None, :]
        values += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(residual.dtype.element_ty)
        tl.store(places, stored, mask=inside)
        values = stored.to(tl.float32)  # what the next layer will read is what is normalised here
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    factors = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    result = values * scale[:, None] * factors[None, :]
    tl.store(
        out + (token * out_token_stride + head * out_head_stride)[:, None] + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=inside,
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise the last dimension of `[num_tokens, size]` or `[num_tokens, num_heads, size]`.

    Only the last dimension must be dense, so `x` may be the query heads of a fused projection. Writes to
    `out`, which may be `x` itself, or to a new tensor. The sum of squares and the product are float32.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` `[num_tokens, size]` to `residual` in place and return the norm of the sum.

    The sum is rounded to the residual's dtype before it is normalised.
    """
    assert x.dim() == 2
    assert residual.shape == x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out)
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin of `rms_norm` in plain torch."""
    values = x.float()
    result = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    return result.to(x.dtype) if out is None else out.copy_(result)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The twin of `add_rms_norm` in plain torch."""
    residual.copy_(x.float() + residual.float())
    return rms_norm_reference(residual, weight, eps).to(x.dtype)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    assert out.shape == x.shape
    assert x.stride(-1) == out.stride(-1) == weight.stride(-1) == 1
    assert residual is None or residual.stride(-1) == 1
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows == 0:
        return
    block, rows, num_warps = _tile(x.shape[-1])
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        NUM_HEADS=num_heads,
        SIZE=x.shape[-1],
        BLOCK=block,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


def _tile(size: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program for rows of `size`; nothing else may decide it."""
    block = triton.next_power_of_2(size)
    return block, max(1, _TILE // block), min(16, max(4, block // 512))


def builds(arch: int) -> list[KernelBuild]:
    """The kernel at the sizes of common models: single heads, hidden states with a residual."""
    del arch  # bound by memory, alike everywhere
    shapes = [(64, 9, False), (128, 32, False), (576, 1, True), (4096, 1, True), (8192, 1, True)]
    return [_build(*shape) for shape in shapes]


def _build(size: int, num_heads: int, has_residual: bool) -> KernelBuild:
    block, rows, num_warps = _tile(size)
    strides = ("x_token_stride", "x_head_stride", "out_token_stride", "out_head_stride", "residual_stride")
    return KernelBuild(
        name=f"rms_norm size={size}{' residual' if has_residual else ''}",
        kernel=_rms_norm,
        signature={
            **dict.fromkeys(("x", "weight", "out"), "*bf16"),
            "residual": "*fp32",
            **dict.fromkeys(("num_rows", *strides), "i32"),
            "eps": "fp32",
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "SIZE": size,
            "BLOCK": block,
            "ROWS": rows,
            "HAS_RESIDUAL": has_residual,
        },
        options={"num_warps": num_warps, "enable_fp_fusion": True},
        aligned=frozenset(strides),
        is_sample=size in (64, 4096),
    )
