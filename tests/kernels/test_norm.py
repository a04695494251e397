"""RMS norm against its twin: sizes, dtypes, strides, residual; a row is its own, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.closeness import assert_close, normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 96, 576, 1000, 4096])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_hidden_states_are_normalised_as_the_twin_does(
    device: torch.device, dtype: torch.dtype, size: int, num_tokens: int
) -> None:
    x, weight = normal(1, (num_tokens, size), dtype, device), normal(2, (size,), dtype, device)
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 576, 2048])
def test_the_residual_is_added_rounded_and_kept(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, residual = normal(3, (9, size), dtype, device), normal(4, (9, size), dtype, device) * 10
    weight = normal(5, (size,), dtype, device)
    wanted_residual = residual.clone()
    wanted = add_rms_norm_reference(x, wanted_residual, weight, EPS)
    found = add_rms_norm(x, residual, weight, EPS)
    if dtype == torch.bfloat16:  # the interpreter cuts off bits where a device rounds
        assert_close(residual, wanted_residual)
        wanted = rms_norm_reference(residual, weight, EPS)
    else:
        assert torch.equal(residual, wanted_residual)
    assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 64), (1, 128), (9, 80), (2, 256)])
def test_heads_inside_a_fused_projection_are_normalised_in_place_and_nothing_else_is_read(
    device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    fused = torch.full((11, num_heads + 2, head_dim), torch.nan, dtype=dtype, device=device)
    heads = fused[:, 1:-1]
    heads.copy_(normal(6, (11, num_heads, head_dim), dtype, device))
    weight = normal(7, (head_dim,), dtype, device)
    wanted = rms_norm_reference(heads, weight, EPS)
    assert rms_norm(heads, weight, EPS, out=heads).data_ptr() == heads.data_ptr()
    assert_close(heads, wanted)
    assert fused[:, 0].isnan().all()
    assert fused[:, -1].isnan().all()


@pytest.mark.parametrize("size", [64, 576])
def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(device: torch.device, size: int) -> None:
    x, residual = normal(8, (37, size), torch.float32, device), normal(9, (37, size), torch.float32, device)
    weight = normal(10, (size,), torch.float32, device)
    together, sums = rms_norm(x, weight, EPS), residual.clone()
    added = add_rms_norm(x, sums, weight, EPS)
    for i in (0, 20, 36):
        own = residual[i : i + 1].clone()
        assert torch.equal(rms_norm(x[i : i + 1], weight, EPS), together[i : i + 1])
        assert torch.equal(add_rms_norm(x[i : i + 1], own, weight, EPS), added[i : i + 1])
        assert torch.equal(own, sums[i : i + 1])


def test_large_tiny_and_zero_rows_stay_finite(device: torch.device) -> None:
    x = torch.tensor([[1e15], [1e-18], [0.0], [-1e15]], device=device).expand(4, 100).contiguous()
    weight = normal(11, (100,), torch.float32, device)
    found = rms_norm(x, weight, EPS)
    assert found.isfinite().all()
    assert_close(found, rms_norm_reference(x, weight, EPS))


def test_no_tokens_are_no_work(device: torch.device) -> None:
    assert rms_norm(torch.empty(0, 64, device=device), torch.ones(64, device=device), EPS).shape == (0, 64)
