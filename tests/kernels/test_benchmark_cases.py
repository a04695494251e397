"""The cases that `benchmarks/kernels.py` measures equal their twins, at toy shapes."""

from __future__ import annotations

import math

import torch

from benchmarks.gpu.cases import measure
from benchmarks.gpu.timing import Timer
from benchmarks.kernels import cases


def test_each_case_runs_and_equals_its_twin(device: torch.device) -> None:
    rows = [measure(case, Timer(device, runs=1), math.nan) for case in cases(True, device)]
    kernels = {row.what for row in rows}
    assert kernels == {
        "prefill attention",
        "decode attention",
        "rotation + KV write",
        "RMS norm + residual",
        "SwiGLU",
        "sampling",
    }
    assert [row for row in rows if not row.is_right] == []
