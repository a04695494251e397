"""Cases of attention: prefill against the backends of scaled_dot_product_attention, decode against a copy.

Owns random pools with shuffled blocks and the batches over them. Both kernels are measured over small blocks
and over those that the copy engine takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cases import BEST, COPY, Call, KernelCase, Rate
from engine.batch import Batch
from engine.kernels import reference
from engine.kernels.decode_attention import decode_attention
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.tables import AttentionTiles, architecture, attention_tiles
from engine.kernels.work import StepWork, plan_work

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_MAX_SCORE_BYTES = 8 << 30  # that the math backend may write
_MAX_TWIN_TOKENS = 1 << 15  # new tokens times context would take the twin too long


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What is measured; `is_toy` for an interpreter."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dims: tuple[int, ...] = (64, 128)
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    num_prefill_tokens: int = 16384
    batches: tuple[int, ...] = (1, 8, 32, 64)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    block_sizes: tuple[int, ...] = (16, 128)
    dtype: torch.dtype = torch.bfloat16


TOY = AttentionSizes(4, 2, (64,), (70,), 140, (1, 3), (70,), (16,))


class Sequences:
    """`count` sequences of `length` tokens in shuffled blocks of one layer's pool, `num_new` of them new."""

    def __init__(
        self, sizes: AttentionSizes, head_dim: int, block_size: int, count: int, length: int, num_new: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        num_blocks = -(-length // block_size)
        shape = (2, count * num_blocks + 1, sizes.num_kv_heads, block_size, head_dim)
        generator = torch.Generator(device).manual_seed(0)
        pool = torch.empty(shape, dtype=sizes.dtype, device=device).normal_(generator=generator)
        self.kv = PagedKV(pool[0], pool[1])
        self.q = torch.empty(
            (count * num_new, sizes.num_heads, head_dim), dtype=sizes.dtype, device=device
        ).normal_(generator=generator)
        self.out = torch.empty_like(self.q)
        self.rule = AttentionRule(head_dim**-0.5)
        self.tiles: AttentionTiles = attention_tiles(architecture(device), head_dim, sizes.dtype, block_size)
        tables = np.random.default_rng(0).permutation(count * num_blocks).reshape(count, num_blocks) + 1
        positions = np.tile(np.arange(length - num_new, length), count)
        rows = np.repeat(np.arange(count), num_new)
        batch = Batch(
            order=np.arange(count),
            num_new=np.full(count, num_new),
            num_context=np.full(count, length - num_new),
            starts=np.arange(count) * num_new,
            block_tables=tables,
            token_ids=torch.empty(0),
            positions=torch.from_numpy(positions),
            token_blocks=tables[rows, positions // block_size],
            token_offsets=positions % block_size,
        )
        tokens_per_tile = self.tiles.prefill.rows // (sizes.num_heads // sizes.num_kv_heads)
        self.work: StepWork = plan_work(batch, tokens_per_tile, self.tiles.decode.split, block_size, device)

    def run(self, out: torch.Tensor, *, is_twin: bool = False) -> None:
        prefill = reference.prefill_attention if is_twin else prefill_attention
        decode = reference.decode_attention if is_twin else decode_attention
        if self.work.prefill is not None:
            prefill(self.q, self.kv, out, self.work.prefill, self.rule, self.tiles)
        for part in self.work.decodes:
            decode(self.q, self.kv, out, part, self.rule, self.tiles)

    def error(self) -> float:
        expected = torch.empty_like(self.out)
        self.run(expected, is_twin=True)
        return self.error_from(expected)

    def error_from(self, expected: torch.Tensor) -> float:
        self.out.fill_(math.nan)
        self.run(self.out)
        difference = (self.out.float() - expected.float()).abs().max() / expected.float().abs().max()
        return math.inf if bool(difference.isnan()) else float(difference)


def attention_cases(sizes: AttentionSizes, device: torch.device) -> Iterator[KernelCase]:
    for head_dim, length, block_size in itertools.product(sizes.head_dims, sizes.lengths, sizes.block_sizes):
        yield _prefill(sizes, head_dim, length, block_size, device)
    head_dim = sizes.head_dims[-1]
    for batch, context, block_size in itertools.product(sizes.batches, sizes.contexts, sizes.block_sizes):
        yield _decode(sizes, head_dim, batch, context, block_size, device)


def _prefill(
    sizes: AttentionSizes, head_dim: int, length: int, block_size: int, device: torch.device
) -> KernelCase:
    count = max(1, sizes.num_prefill_tokens // length)
    sequences = Sequences(sizes, head_dim, block_size, count, length, length, device)
    return KernelCase(
        kernel="prefill attention",
        shape=f"head {head_dim}, {count} × {length}, blocks of {block_size}",
        work=4 * count * sizes.num_heads * head_dim * length * (length + 1) / 2,
        rate=Rate.FLOPS,
        ours=lambda: sequences.run(sequences.out),
        error=sequences.error if device.type == "cpu" else lambda: _sdpa_error(sequences, sizes, count),
        rivals=_sdpa_calls(sizes, count, length, head_dim, device),
        bars={BEST: 0.75, "flash": 1.0} if head_dim == 128 else {},
    )


def _decode(
    sizes: AttentionSizes, head_dim: int, batch: int, context: int, block_size: int, device: torch.device
) -> KernelCase:
    sequences = Sequences(sizes, head_dim, block_size, batch, context, 1, device)
    item = sequences.kv.keys.element_size()
    num_bytes = 2 * batch * context * sizes.num_kv_heads * head_dim * item
    num_bytes += 2 * batch * sizes.num_heads * head_dim * item
    return KernelCase(
        kernel="decode attention",
        shape=f"head {head_dim}, batch {batch}, context {context}, blocks of {block_size}",
        work=num_bytes,
        rate=Rate.BYTES,
        ours=lambda: sequences.run(sequences.out),
        error=sequences.error if batch * context <= _MAX_TWIN_TOKENS else None,
        has_copy=True,
        bars={COPY: 0.85} if batch >= 8 and context == 4096 else {},
    )


def _sdpa_calls(
    sizes: AttentionSizes, count: int, length: int, head_dim: int, device: torch.device
) -> dict[str, Call]:
    shape = (count, sizes.num_heads, length, head_dim)
    q = torch.randn(shape, device=device, dtype=sizes.dtype)
    k, v = (
        torch.randn((count, sizes.num_kv_heads, length, head_dim), device=device, dtype=sizes.dtype)
        for _ in range(2)
    )
    calls: dict[str, Call] = {}
    for name, backend in _BACKENDS.items():
        if name == "math" and count * sizes.num_heads * length**2 * 4 > _MAX_SCORE_BYTES:
            continue
        calls[name] = _sdpa_call(q, k, v, backend)
    return calls


def _sdpa_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend) -> Call:
    """With as few KV heads as given, or repeated beforehand for a backend that cannot share them."""
    group = q.shape[1] // k.shape[1]

    def attend(keys: torch.Tensor, values: torch.Tensor, shares: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=shares)

    repeated: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        if not repeated:
            try:
                return attend(k, v, True)
            except RuntimeError:
                repeated.extend(part.repeat_interleave(group, 1) for part in (k, v))
        return attend(repeated[0], repeated[1], False)

    return call


def _sdpa_error(sequences: Sequences, sizes: AttentionSizes, count: int) -> float:
    """The first sequence only, over its gathered keys, in whatever backend torch chooses."""
    assert sequences.work.prefill is not None
    num_new = sequences.q.shape[0] // count
    table = sequences.work.prefill.tables[0].long()
    keys, values = (
        pool[table].transpose(0, 1).flatten(1, 2)[None, :, :num_new]
        for pool in (sequences.kv.keys, sequences.kv.values)
    )
    q = sequences.q[:num_new].transpose(0, 1)[None]
    group = sizes.num_heads // sizes.num_kv_heads
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    expected = F.scaled_dot_product_attention(q, keys, values, is_causal=True)[0].transpose(0, 1)
    sequences.out.fill_(math.nan)
    sequences.run(sequences.out)
    difference = (sequences.out[:num_new].float() - expected.float()).abs().max()
    relative = float(difference / expected.float().abs().max())
    return math.inf if math.isnan(relative) or bool(sequences.out.isnan().any()) else relative
