"""Cases of the kernels around attention: rotation and KV write, norm, gated activation, sampling.

What is bound by memory is measured against a copy of the same bytes, sampling against torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.cases import KernelCase, Rate
from core.request import SamplingParams
from engine.kernels import reference
from engine.kernels.activation import Activation, gated_activation, gated_activation_reference
from engine.kernels.kv_write import Rotation, kv_write
from engine.kernels.norm import add_rms_norm, add_rms_norm_reference
from engine.kernels.paged_kv import PagedKV
from engine.kernels.sampling import sample, sample_reference
from engine.kernels.sampling_pack import pack
from engine.sampling import SamplingRow, columns_of

_NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Of the layers whose kernels are measured."""

    hidden: int = 4096
    inner: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    num_tokens: tuple[int, ...] = (64, 8192)
    num_rows: tuple[int, ...] = (1, 64)
    dtype: torch.dtype = torch.bfloat16


TOY = ModelSizes(64, 96, 4, 2, 32, 300, (5,), (3,))


def other_cases(sizes: ModelSizes, device: torch.device) -> Iterator[KernelCase]:
    for num_tokens in sizes.num_tokens:
        yield _kv_write(sizes, num_tokens, device)
        yield _norm(sizes, num_tokens, device)
        yield _activation(sizes, num_tokens, device)
    for num_rows in sizes.num_rows:
        yield _greedy(sizes, num_rows, device)
        yield _nucleus(sizes, num_rows, device)


def _kv_write(sizes: ModelSizes, num_tokens: int, device: torch.device) -> KernelCase:
    heads = _normal((num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim), sizes, device)
    q, kv_heads = heads[:, : sizes.num_heads], heads[:, sizes.num_heads :]
    k, v = kv_heads[:, : sizes.num_kv_heads], kv_heads[:, sizes.num_kv_heads :]
    block_size = 16
    shape = (2, -(-num_tokens // block_size), sizes.num_kv_heads, block_size, sizes.head_dim)
    pool = torch.zeros(shape, dtype=sizes.dtype, device=device)
    slots = torch.randperm(num_tokens, device=device)
    angles = torch.randn((num_tokens, sizes.head_dim // 2), device=device)
    rotation = Rotation(angles.cos(), angles.sin())
    kv = PagedKV(pool[0], pool[1])

    def error() -> float:
        twin = torch.zeros_like(pool)
        found_q, twin_q = heads.clone(), heads.clone()
        kv_write(found_q[:, : sizes.num_heads], k, v, kv, slots, rotation)
        reference.kv_write(twin_q[:, : sizes.num_heads], k, v, PagedKV(twin[0], twin[1]), slots, rotation)
        return max(_error(pool, twin), _error(found_q, twin_q))

    item = heads.element_size()
    moved = (2 * q.numel() + 2 * k.numel() + 2 * v.numel()) * item + 2 * angles.numel() * 4 * 2
    return KernelCase(
        "rotation + KV write", f"{num_tokens} tokens", moved, Rate.BYTES,
        lambda: kv_write(q, k, v, kv, slots, rotation), error, has_copy=True,
    )  # fmt: skip


def _norm(sizes: ModelSizes, num_tokens: int, device: torch.device) -> KernelCase:
    x, residual = (_normal((num_tokens, sizes.hidden), sizes, device) for _ in range(2))
    weight = _normal((sizes.hidden,), sizes, device)

    def error() -> float:
        found_residual, twin_residual = residual.clone(), residual.clone()
        found = add_rms_norm(x, found_residual, weight, 1e-5)
        twin = add_rms_norm_reference(x, twin_residual, weight, 1e-5)
        return max(_error(found, twin), _error(found_residual, twin_residual))

    return KernelCase(
        "RMS norm + residual", f"{num_tokens} tokens of {sizes.hidden}", 4 * x.numel() * x.element_size(),
        Rate.BYTES, lambda: add_rms_norm(x, residual, weight, 1e-5), error, has_copy=True,
    )  # fmt: skip


def _activation(sizes: ModelSizes, num_tokens: int, device: torch.device) -> KernelCase:
    gate_up = _normal((num_tokens, 2 * sizes.inner), sizes, device)
    return KernelCase(
        kernel="SwiGLU",
        shape=f"{num_tokens} tokens of {sizes.inner}",
        work=1.5 * gate_up.numel() * gate_up.element_size(),
        rate=Rate.BYTES,
        ours=lambda: gated_activation(gate_up, Activation.SILU),
        error=lambda: _error(
            gated_activation(gate_up, Activation.SILU), gated_activation_reference(gate_up, Activation.SILU)
        ),
        has_copy=True,
    )


def _greedy(sizes: ModelSizes, num_rows: int, device: torch.device) -> KernelCase:
    params = SamplingParams(max_tokens=8, seed=1, temperature=0.0)

    def rival(logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    return _sampling("greedy", params, sizes, num_rows, device, ("torch argmax", rival))


def _nucleus(sizes: ModelSizes, num_rows: int, device: torch.device) -> KernelCase:
    top_k, top_p, temperature = 50, 0.95, 0.8
    params = SamplingParams(max_tokens=8, seed=1, temperature=temperature, top_p=top_p, top_k=top_k)

    def rival(logits: torch.Tensor) -> torch.Tensor:
        values, ids = (logits / temperature).topk(top_k, dim=-1)
        weights = torch.softmax(values, -1)
        weights = weights.masked_fill(weights.cumsum(-1) - weights > top_p, 0.0)
        return ids.gather(-1, torch.multinomial(weights, 1))

    name = f"top-k {top_k}, top-p {top_p}"
    return _sampling(name, params, sizes, num_rows, device, ("torch top-k, softmax, multinomial", rival))


def _sampling(
    name: str,
    params: SamplingParams,
    sizes: ModelSizes,
    num_rows: int,
    device: torch.device,
    rival: tuple[str, Callable[[torch.Tensor], torch.Tensor]],
) -> KernelCase:
    logits = torch.randn((num_rows, sizes.vocab), device=device) * 3
    rows = [SamplingRow(params, i, [1, 2, 3], 2, frozenset({2})) for i in range(num_rows)]
    batch = pack(columns_of(rows), sizes.vocab, device)

    def error() -> float:
        """The share of rows with another token that is not at a near tie."""
        found, twin = sample(logits, batch).columns(batch), sample_reference(logits, batch).columns(batch)
        differs = (found.token_ids != twin.token_ids) & (twin.gaps >= _NEAR_TIE)
        return float(differs.mean())

    rival_name, rival_call = rival
    return KernelCase(
        kernel="sampling",
        shape=f"{name}, {num_rows} rows of {sizes.vocab}",
        work=logits.numel() * 4,
        rate=Rate.BYTES,
        ours=lambda: sample(logits, batch),
        error=error,
        limit=0.0,
        rivals={rival_name: lambda: rival_call(logits)},
    )


def _normal(shape: tuple[int, ...], sizes: ModelSizes, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(sizes.dtype)


def _error(found: torch.Tensor, twin: torch.Tensor) -> float:
    difference = (found.float() - twin.float()).abs().max() / twin.float().abs().max()
    return float(difference.nan_to_num(float("inf")))
