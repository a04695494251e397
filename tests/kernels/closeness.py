"""How close a kernel must come to its twin, and the data for it."""

from __future__ import annotations

import torch


def normal(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Standard normal numbers, the same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-5 (float32) or 1e-2 (16 bits) of the twin, relative to the larger of the value and one."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
