"""Gated activations against their twin: widths, dtypes, large values, strided rows."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.activation import Activation, gated_activation, gated_activation_reference
from tests.kernels.closeness import assert_close, normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("size", [1, 63, 1024, 1536])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_gate_and_up_are_joined_as_the_twin_does(
    device: torch.device, dtype: torch.dtype, activation: Activation, size: int, num_tokens: int
) -> None:
    gate_up = normal(1, (num_tokens, 2 * size), dtype, device) * 3
    found = gated_activation(gate_up, activation)
    assert_close(found, gated_activation_reference(gate_up, activation))


@pytest.mark.parametrize("activation", list(Activation))
def test_large_gates_saturate_and_do_not_overflow(device: torch.device, activation: Activation) -> None:
    gate = torch.tensor([1e4, -1e4, 200.0, -200.0, 88.8, -88.8, 0.0, -0.0, 1e-30], device=device)
    gate_up = torch.cat([gate, torch.full_like(gate, 1.5)])[None]
    found = gated_activation(gate_up, activation)
    assert found.isfinite().all()
    assert_close(found, gated_activation_reference(gate_up, activation))


@pytest.mark.parametrize("activation", list(Activation))
def test_padding_between_rows_is_neither_read_nor_needed(
    device: torch.device, activation: Activation
) -> None:
    padded = torch.full((4, 150), torch.nan, device=device)
    gate_up = padded[:, :140]
    gate_up.copy_(normal(2, (4, 140), torch.float32, device))
    found = gated_activation(gate_up, activation)
    assert_close(found, gated_activation_reference(gate_up, activation))
    for i in range(4):
        assert torch.equal(gated_activation(gate_up[i : i + 1], activation), found[i : i + 1])


def test_no_tokens_are_no_work(device: torch.device) -> None:
    assert gated_activation(torch.empty(0, 64, device=device), Activation.SILU).shape == (0, 32)
