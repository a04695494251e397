"""Beside the device's work, only arithmetic on arrays grows with the number of streams of a decode step."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import CodeType, FrameType

from benchmarks.step_overhead import Bench

_CONTEXT = 64  # prompts of 64 to 79 tokens
_NUM_STEPS = 60


@asynccontextmanager
async def streaming(
    num_sequences: int, temperature: float = 0.0, overlap: str = "off"
) -> AsyncIterator[Bench]:
    """A bench whose streams have run for some steps."""
    options = argparse.Namespace(temperature=temperature, cpu_kernels="auto", overlap=overlap, device_ms=0.0)
    bench = Bench(num_sequences, _CONTEXT, _NUM_STEPS, options)
    await bench.start()
    try:
        await bench.measure(8, time.thread_time)
        yield bench
    finally:
        await bench.stop()


def calls_of(action: Callable[[], None]) -> Counter[CodeType]:
    """Calls of Python functions."""
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


async def calls_of_a_step(num_sequences: int, temperature: float, overlap: str) -> Counter[CodeType]:
    """Sum over 16 steps, in which each stream enters one block and fills one."""
    total: Counter[CodeType] = Counter()
    async with streaming(num_sequences, temperature, overlap) as bench:
        for _ in range(16):
            total += calls_of(bench.step)
            await bench.fan_out()
    return total


async def test_no_function_is_called_for_each_stream_but_where_it_enters_or_fills_a_block() -> None:
    for temperature, overlap in ((0.0, "off"), (1.0, "off"), (0.0, "on")):
        few, many = [await calls_of_a_step(num, temperature, overlap) for num in (16, 128)]
        for code, num_calls in many.items():
            # once in 16 steps, a stream enters a block and another becomes full
            grown = num_calls - few[code]
            assert grown <= 4 * (128 - 16), (
                f"{code.co_qualname} is called {num_calls} times, {few[code]} for 16"
            )


async def test_no_function_is_called_for_each_stream_within_a_block() -> None:
    async with streaming(64) as bench:
        num_calls = []
        for _ in range(16):
            calls = calls_of(bench.step)
            await bench.fan_out()
            num_calls.append(max(calls.values()))
    assert min(num_calls) < 64, f"in each step some function is called {min(num_calls)} times"


async def test_a_step_of_256_streams_costs_the_step_thread_less_than_5_ms() -> None:
    async with streaming(256) as bench:
        steps, _ = await bench.measure(40, time.thread_time)
    assert statistics.median(steps) < 0.005
