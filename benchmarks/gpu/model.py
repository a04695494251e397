"""Decode and prefill of an 8B-shaped random model, planned and run as by a worker, against the roofline.

python -m benchmarks.gpu.model [--rows FILE] [--toy]

A decode step cannot be faster than its bytes (weights once, the context's KV once) at the bandwidth of a
device copy, a prefill not faster than its products at cuBLAS's rate. The host gap is the share of a step in
which the device does nothing. First, tokens computed by a decode step are compared with a prefill's; exits
with 1 if they differ.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.rows import HEADER, Row, RowFile, verdict
from benchmarks.gpu.timing import Timer, device_here
from engine.config import EngineConfig
from engine.step import StepLimits

if TYPE_CHECKING:
    from benchmarks.gpu.random_model import RandomModel

_MAX_GAP = 0.05
_MAX_ERROR = 0.05  # of a log-probability in bf16
_BARS = {1: 0.85, 64: 0.75}  # of the byte roofline, by batch


@dataclass(frozen=True, slots=True)
class ModelCases:
    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 2048
    num_steps: int = 20
    prompts: tuple[int, ...] = (2048, 8192)
    split_prompts: tuple[int, ...] = (700, 33, 2)

    @property
    def max_steps(self) -> int:
        """More than a measurement makes: two runs and what warms up."""
        return 3 * self.num_steps + 8

    @property
    def num_pool_tokens(self) -> int:
        return max(max(self.batches) * (self.context + self.max_steps + 16), max(self.prompts) + 128)


TOY = ModelCases((3,), 20, 4, (20,), (17,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--block-size", type=int, default=EngineConfig().block_size)
    options = parser.parse_args()
    device = device_here()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # loaded late: the interpreter is chosen before
    from benchmarks.gpu.random_model import LLAMA_3_8B, make_model
    from benchmarks.gpu.random_model import TOY as TOY_MODEL

    is_toy = options.toy or device.type == "cpu"
    cases = TOY if is_toy else ModelCases()
    limits = StepLimits(max(cases.prompts), max(cases.batches))
    num_blocks = cases.num_pool_tokens // options.block_size + max(cases.batches)
    config = TOY_MODEL if is_toy else LLAMA_3_8B
    model = make_model(config, device, limits, num_blocks, options.block_size)
    file, timer = RowFile(options.rows), Timer(device)
    print(HEADER)
    file.add_all("decode step computes what prefill does", lambda: [_equality(model, cases)])
    file.add_all("decode step", lambda: _decodes(model, cases, timer))
    file.add_all("prefill", lambda: _prefills(model, cases, timer))
    return 0 if file.is_right else 1


def _equality(model: RandomModel, cases: ModelCases) -> Row:
    from benchmarks.gpu.model_steps import split_error

    error = split_error(model, cases.split_prompts)
    is_right = error <= _MAX_ERROR
    return Row(
        "decode step computes what prefill does",
        model.name,
        error,
        "nats",
        bar=f"≤ {_MAX_ERROR:g}",
        verdict="pass" if is_right else "fail",
        is_right=is_right,
    )


def _decodes(model: RandomModel, cases: ModelCases, timer: Timer) -> Iterator[Row]:
    """Two rows for each batch: the step and its host gap."""
    from benchmarks.gpu.model_steps import Steps

    copy = timer.copy_bandwidth(2 << 30) / 1e9 if timer.is_real else math.nan
    for batch in cases.batches:
        steps = Steps(model, batch, cases.context, cases.max_steps)
        seconds, busy = steps.measure(cases.num_steps)
        steps.close()
        context_bytes = batch * cases.context * model.runner.layout.bytes_per_token
        rate = (model.weight_bytes + context_bytes) / seconds / 1e9 if timer.is_real else math.nan
        bar = _BARS.get(batch)
        yield Row(
            "decode step",
            f"{model.name}, batch {batch}, context {cases.context}",
            rate,
            "GB/s",
            "copy",
            copy,
            f"≥ {bar:g}" if bar else "",
            verdict(rate / copy, bar) if bar else "",
            note=f"{1e3 * seconds:.2f} ms, {batch / seconds:.0f} tokens/s" if timer.is_real else "",
        )
        gap = max(0.0, 1 - busy / seconds) if timer.is_real else math.nan
        is_short = "" if math.isnan(gap) else "pass" if gap < _MAX_GAP else "fail"
        yield Row("host gap of a step", f"batch {batch}", 100 * gap, "%", bar="< 5 %", verdict=is_short)


def _prefills(model: RandomModel, cases: ModelCases, timer: Timer) -> Iterator[Row]:
    from benchmarks.gpu.model_steps import prefill_seconds

    matmul = timer.matmul_rate(8192, model.dtype) / 1e12 if timer.is_real else math.nan
    for num_tokens in cases.prompts:
        seconds = prefill_seconds(model, num_tokens, 5 if timer.is_real else 1)
        rate = model.prefill_flop(num_tokens) / seconds / 1e12 if timer.is_real else math.nan
        note = f"{1e3 * seconds:.1f} ms, {num_tokens / seconds:.0f} tokens/s" if timer.is_real else ""
        case = f"{model.name}, {num_tokens} tokens"
        yield Row("prefill", case, rate, "TFLOP/s", "cuBLAS", matmul, note=note)


if __name__ == "__main__":
    sys.exit(main())
