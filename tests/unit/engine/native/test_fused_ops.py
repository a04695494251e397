"""Norm, rotation with KV write, and SwiGLU equal their twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.native.operators import NativeOps
from engine.native.plan import AttentionPlan
from engine.native.reference import ReferenceOps

_NOTHING = np.zeros((0, 0), dtype=np.int64)
_PLAN = AttentionPlan(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("size", [1, 15, 16, 64, 576, 1000])
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_rms_norm_equals_the_twin(ops: NativeOps, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size) * 5, torch.randn(size)
    assert_close(ops.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.rms_norm(x[:1], weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[:1])


@pytest.mark.parametrize("size", [1, 15, 16, 100, 1536])
@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_swiglu_equals_the_twin(ops: NativeOps, num_rows: int, size: int) -> None:
    gate_up = torch.randn(num_rows, 2 * size) * 20
    assert_close(ops.swiglu(gate_up), ReferenceOps().swiglu(gate_up))
    assert torch.equal(ops.swiglu(gate_up[:1]), ops.swiglu(gate_up)[:1])


def test_swiglu_of_extremes(ops: NativeOps) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 90.0, 200.0, 1e30, torch.inf, torch.nan]])
    out = ops.swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    assert out[:3].abs().max() < 1e-7
    assert torch.equal(out[3:8], gate[0, 3:8])
    assert out[8].isnan()


@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (4, 2, 16, 4), (3, 1, 96, 7)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_rotation_and_kv_write_equal_the_twin(
    ops: NativeOps, shape: tuple[int, int, int, int], num_tokens: int
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    angles = torch.rand(num_tokens, 1, head_dim // 2) * 7
    slots = np.random.default_rng(0).permutation(60 * block_size)[:num_tokens]
    plan = replace(_PLAN, token_blocks=slots // block_size, token_offsets=slots % block_size)
    results = []
    for implementation in (ops, ReferenceOps()):
        pools = [torch.full((60, num_kv_heads, block_size, head_dim), 9.0) for _ in range(2)]
        rotated = heads.clone()
        implementation.rotate_store(rotated, num_heads, angles.cos(), angles.sin(), *pools, plan)
        results.append((rotated, *pools))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
