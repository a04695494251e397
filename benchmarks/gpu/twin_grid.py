"""The grid of the kernels' tests without pytest: each kernel against its twin, one row per kernel.

Uses the tests' own data: shuffled blocks, NaN wherever nothing was written, rows with all kinds of sampling
parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.rows import Row, RowFile
from engine.kernels.activation import Activation, gated_activation, gated_activation_reference
from engine.kernels.norm import add_rms_norm, add_rms_norm_reference
from engine.kernels.paged_kv import AttentionRule
from engine.kernels.tables import AttentionTiles, architecture, attention_tiles
from tests.kernels import closeness
from tests.kernels.pages import SMALL, Heads, Pages, assert_close
from tests.kernels.sampling_rows import compared, normal_logits, random_rows

_LENGTHS = [1, 15, 16, 17, 130, 257]
_NEW = [(0, 1), (1, 15), (2, 1), (3, 8), (4, 130), (5, 9)]
"""Sequence, how many of its tokens are new: decodes, drafts, chunks over context, whole prompts."""


def add_rows(file: RowFile, device: torch.device, *, is_toy: bool) -> None:
    checks: dict[str, Callable[[], int]] = {
        "attention": lambda: _attention(device, is_toy),
        "attention, alone or beside others, bit for bit": lambda: _invariance(device),
        "RMS norm + residual": lambda: _norm(device, is_toy),
        "gated activations": lambda: _activations(device, is_toy),
        "sampling": lambda: _sampling(device, is_toy),
    }
    for what, check in checks.items():
        file.add_all(what, partial(_row, what, check))


def _row(what: str, check: Callable[[], int]) -> list[Row]:
    return [Row("kernel equals its twin", what, check(), "cases")]


def _attention(device: torch.device, is_toy: bool) -> int:
    dtypes = [torch.float32] if is_toy else [torch.float32, torch.bfloat16, torch.float16]
    head_dims = [64] if is_toy else [64, 80, 128, 256]
    block_sizes = [16] if is_toy else [16, 128]
    num = 0
    for dtype, head_dim, block_size in itertools.product(dtypes, head_dims, block_sizes):
        heads = Heads(8, 2, head_dim, block_size, dtype)
        pages = Pages(_LENGTHS, heads, device)
        tiles = attention_tiles(architecture(device), head_dim, dtype, block_size)
        plain = heads.rule
        rules = (
            [plain]
            if is_toy
            else [plain, AttentionRule(plain.scale, 30.0), AttentionRule(plain.scale, 0, 50)]
        )
        for rule in rules:
            assert_close(pages.run(_NEW, tiles, rule), pages.run(_NEW, tiles, rule, twin=True))
            num += 1
    return num


def _invariance(device: torch.device) -> int:
    heads = Heads(4, 2, 64)
    pages = Pages(_LENGTHS, heads, device)
    tiles: AttentionTiles = SMALL
    together = pages.run(_NEW, tiles, heads.rule)
    first = 0
    for index, count in _NEW:
        alone = pages.run([(index, count)], tiles, heads.rule)
        assert torch.equal(alone, together[first : first + count]), f"sequence {index} depends on its batch"
        first += count
    return len(_NEW)


def _norm(device: torch.device, is_toy: bool) -> int:
    dtypes = [torch.float32] if is_toy else [torch.float32, torch.bfloat16, torch.float16]
    sizes = [576] if is_toy else [64, 576, 4096, 8192]
    for dtype, size in itertools.product(dtypes, sizes):
        x, residual = (closeness.normal(seed, (17, size), dtype, device) for seed in (1, 2))
        weight = closeness.normal(3, (size,), dtype, device)
        other = residual.clone()
        found = add_rms_norm(x, residual, weight, 1e-5)
        closeness.assert_close(found, add_rms_norm_reference(x, other, weight, 1e-5))
        closeness.assert_close(residual, other)
    return len(dtypes) * len(sizes)


def _activations(device: torch.device, is_toy: bool) -> int:
    dtypes = [torch.float32] if is_toy else [torch.float32, torch.bfloat16, torch.float16]
    for dtype, activation in itertools.product(dtypes, Activation):
        gate_up = closeness.normal(4, (9, 2 * 1500), dtype, device)
        found = gated_activation(gate_up, activation)
        closeness.assert_close(found, gated_activation_reference(gate_up, activation))
    return len(dtypes) * len(Activation)


def _sampling(device: torch.device, is_toy: bool) -> int:
    cases = [(1, 8, 300)] if is_toy else [(1, 60, 1000), (2, 40, 49_152), (3, 20, 128_256)]
    for seed, num_rows, vocab_size in cases:
        logits = normal_logits(seed, num_rows, vocab_size, 3.0, device)
        comparison = compared(logits, random_rows(seed, num_rows, vocab_size))
        assert len(comparison.near_ties) <= 1, f"{len(comparison.near_ties)} near ties of {num_rows} rows"
    return sum(num_rows for _, num_rows, _ in cases)
