"""What this machine allows at most on workloads B and C of `benchmarks.workloads`, by arithmetic and bytes.

`python -m benchmarks.limits [--model FOLDER] [--threads 2]` measures the rate of fp32 matrix products (the
better of torch's and our own) and the speed of reading memory, and says how fast a server could be whose
every step takes only what its products or its bytes take (16-bit weights, fp32 arithmetic and KV):
*in turns*, prompts first and then all streams, each step the longer of its arithmetic and its bytes; and
*overlapped*, the longer of all arithmetic and all bytes. Nothing else is counted: no server's own work, no
caches that are missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.workloads import Shape, shapes_of_b
from cluster.planner.model_config import read_model_shape
from cluster.planner.model_shape import ModelShape
from engine.model.bundled import prepare_bundled_model
from engine.native.build import NativeUnavailable
from engine.native.operators import load_ops
from engine.native.packing import pack_dense

_ROUNDS = 15
_READ_BYTES = 1 << 30
_SIZE = 1536  # of the square matrices: all three fit the last level's cache


@dataclass(frozen=True, slots=True)
class Machine:
    """The best of some rounds each."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Of a model whose head, `head` parameters, is computed for tokens that are sampled alone."""

    shape: ModelShape
    head: int

    def reading(self, num_tokens: int, num_before: int = 0) -> float:
        """Operations of a prompt of `num_tokens` after `num_before` cached ones."""
        return self.shape.flops(num_tokens, num_before) - 2.0 * self.head * (num_tokens - 1)

    def token(self, num_before: int) -> tuple[float, float]:
        """Operations and bytes of KV of one more token."""
        return self.shape.flops(1, num_before), self.shape.kv_bytes(num_before)


@dataclass(frozen=True, slots=True)
class Limit:
    """Output tokens per second."""

    in_turns: float
    overlapped: float


def best(measure: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        measure()
        times.append(time.perf_counter() - begin)
    return min(times)


def products(left: torch.Tensor, right: torch.Tensor) -> Iterator[Callable[[], object]]:
    """Ways of multiplying square matrices."""
    yield lambda: torch.mm(left, right)
    with contextlib.suppress(NativeUnavailable):
        ops, packed = load_ops(), pack_dense(right)
        yield lambda: ops.linear(left, packed, None)


def measure_machine() -> Machine:
    """With as many threads as torch is set to."""
    left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)
    values = torch.ones(_READ_BYTES // 4)
    return Machine(
        2.0 * _SIZE**3 / min(best(product) for product in products(left, right)),
        _READ_BYTES / best(values.sum),
    )


def limit_of(
    machine: Machine, work: Work, shapes: Sequence[Shape], num_cached: int, concurrency: int
) -> Limit:
    """Of requests of which `concurrency` run at a time, one group after the other; `num_cached` tokens, the
    first of all prompts, are read once.
    """
    weights = work.shape.bytes_read(1)
    all_flops = work.reading(num_cached) if num_cached else 0.0
    turns_s, all_bytes = all_flops / machine.flops_per_s, 0.0
    for first in range(0, len(shapes), concurrency):
        group = shapes[first : first + concurrency]
        flops = sum(work.reading(each.num_prompt_tokens - num_cached, num_cached) for each in group)
        turns_s += max(flops / machine.flops_per_s, weights / machine.bytes_per_s)
        all_flops += flops
        for step in range(1, max(each.num_output_tokens for each in group)):
            tokens = [
                work.token(each.num_prompt_tokens + step) for each in group if step < each.num_output_tokens
            ]
            flops = sum(flops for flops, _ in tokens)
            num_bytes = weights + sum(num_bytes for _, num_bytes in tokens)
            turns_s += max(flops / machine.flops_per_s, num_bytes / machine.bytes_per_s)
            all_flops += flops
            all_bytes += num_bytes
    num_output = sum(each.num_output_tokens for each in shapes)
    overlapped_s = max(all_flops / machine.flops_per_s, all_bytes / machine.bytes_per_s)
    return Limit(num_output / turns_s, num_output / overlapped_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = arguments.model or prepare_bundled_model()
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    work = Work(
        read_model_shape(folder, weight_bits=16).with_bits(None, 32), raw["vocab_size"] * raw["hidden_size"]
    )
    machine = measure_machine()
    rates = f"{machine.flops_per_s / 1e9:.0f} GFLOP/s, {machine.bytes_per_s / 1e9:.1f} GB/s"
    print(f"{arguments.threads} threads: {rates}")
    print("workload  in turns  overlapped  (output tokens per second)")
    loads = {"B": (shapes_of_b(), 0, 16), "C": ([Shape(1056, 32)] * 32, 1024, 8)}
    for name, (shapes, num_cached, concurrency) in loads.items():
        limit = limit_of(machine, work, shapes, num_cached, concurrency)
        print(f"{name:8}  {limit.in_turns:8.0f}  {limit.overlapped:10.0f}")


if __name__ == "__main__":
    main()
