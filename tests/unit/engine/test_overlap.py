"""Where a worker runs ahead of what it knows."""

from __future__ import annotations

from typing import Literal

import pytest

from engine.config import EngineConfig


@pytest.mark.parametrize(
    ("device", "kernels", "overlap", "is_overlapped"),
    [
        ("cuda", "auto", "auto", True),
        ("cuda", "auto", "off", False),
        ("cpu", "auto", "auto", False),
        ("cpu", "native", "on", True),
        ("cpu", "triton", "auto", True),
    ],
)
def test_a_device_of_its_own_is_what_auto_asks_for(
    device: Literal["cpu", "cuda"],
    kernels: Literal["auto", "native", "triton"],
    overlap: Literal["auto", "on", "off"],
    is_overlapped: bool,
) -> None:
    config = EngineConfig(device=device, cpu_kernels=kernels, overlap=overlap)
    assert config.is_overlapped is is_overlapped
