"""Timer: how long the device works on a call; and what the device can do at most.

Owns warm-up, medians and the emptying of the L2 cache. Without a GPU calls are made once and nothing is
timed: an interpreter's time says nothing about a kernel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # several times the largest L2
_SLEEP_CYCLES = 2_000_000  # a millisecond, in which the host queues a call's launches


class Timer:
    """Device times of calls on `device`: CUDA events around each call, all launches queued beforehand."""

    def __init__(self, device: torch.device, runs: int = 15) -> None:
        self.device = device
        self._runs = runs
        self._flush = torch.empty(_FLUSH_BYTES if self.is_real else 0, dtype=torch.uint8, device=device)

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, call: Callable[[], object], *, is_cold: bool = True) -> float:
        """Median of one call, with an emptied L2 if `is_cold`; NaN without a GPU."""
        if not self.is_real:
            call()
            return math.nan
        for _ in range(3):
            call()
        pairs: list[tuple[Any, Any]] = []
        for _ in range(self._runs):
            if is_cold:
                self._flush.zero_()
            _sleep(_SLEEP_CYCLES)
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3

    def copy_bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of a device-to-device copy that reads and writes `num_bytes` in all."""
        size = max(num_bytes // 2, 16)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    def matmul_rate(self, size: int, dtype: torch.dtype) -> float:
        """FLOP per second of a square product of random matrices, by cuBLAS."""
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: a @ b, is_cold=False)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
