"""Every kernel against the best alternative, as one Markdown table.

python -m benchmarks.kernels [--rows FILE] [--toy]

Prefill attention against the backends of scaled_dot_product_attention, sampling against torch's operators,
everything that is bound by memory against a device copy of as many bytes. Medians of CUDA events with an
emptied L2, after warm-up. Each case is compared with its twin too: exits with 1 if one is wrong. The verdicts
are those of the bars; a missed bar is no error.

Without a GPU the kernels run once at toy shapes in Triton's interpreter, which shows that this script and the
kernels are right, and nothing is timed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.cases import KernelCase, measure
from benchmarks.gpu.rows import HEADER, Row, RowFile
from benchmarks.gpu.timing import Timer, device_here


def cases(is_toy: bool, device: torch.device) -> Iterator[KernelCase]:
    # loaded late: the interpreter is chosen before
    from benchmarks.gpu import attention_cases, other_cases

    attention = attention_cases.TOY if is_toy else attention_cases.AttentionSizes()
    others = other_cases.TOY if is_toy else other_cases.ModelSizes()
    yield from attention_cases.attention_cases(attention, device)
    yield from other_cases.other_cases(others, device)


def _row(case: KernelCase, timer: Timer, peak_copy: float) -> list[Row]:
    return [measure(case, timer, peak_copy)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="append the rows to this file as JSON lines")
    parser.add_argument("--toy", action="store_true", help="toy shapes on a GPU too")
    options = parser.parse_args()
    device = device_here()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        print("No GPU: toy shapes in Triton's interpreter, nothing is timed.\n")
    timer = Timer(device)
    file = RowFile(options.rows)
    print(HEADER)
    is_toy = options.toy or device.type == "cpu"
    peak_copy = math.nan
    if timer.is_real:
        peak_copy = timer.copy_bandwidth(2 << 30)
        file.add(Row("device copy", "2 GiB read and written", peak_copy / 1e9, "GB/s"))
        rate = timer.matmul_rate(8192, torch.bfloat16) / 1e12
        file.add(Row("cuBLAS", "bf16, 8192 × 8192 × 8192", rate, "TFLOP/s"))
    for case in cases(is_toy, device):
        file.add_all(f"{case.kernel}, {case.shape}", partial(_row, case, timer, peak_copy))
    return 0 if file.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
