"""Time of an engine step: decode at several batch sizes and contexts, prefill at several lengths.

The bundled model (or `--model`) on torch's and on the native operators, in one process, interleaved run by
run, so that whatever else the machine does falls on both. One table of medians. `--instruction-set` names
those that the native operators are measured for; `--clock cpu` shows the processor's time divided by the
threads, which is what a quiet machine would need if the work were divided evenly.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.native.operators import ISA_VARIABLE
from engine.runner import ModelRunner, use_threads
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan


class Engine:
    """One loaded engine and the sequences of one measurement."""

    def __init__(self, name: str, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.name = name
        self._runner = ModelRunner(load_model(config), config)
        self._runner.warm_up()
        self._runner.cache.pool.tensor.fill_(0.01)  # memory that was never written is not really read
        self._clock = clock
        self._sequences: list[Sequence] = []

    def start(self, num_sequences: int, num_tokens: int) -> None:
        """Sequences whose KV is taken as computed: its values do not change the time."""
        self.drop()
        for index in range(num_sequences):
            ids = tuple((7 * i + index) % 40000 + 100 for i in range(num_tokens))
            request = Request(
                RequestId(f"r{index}"), ids, SamplingParams(max_tokens=1, seed=0, temperature=0.0)
            )
            sequence = new_sequence(request, 0, (), self._runner.max_context)
            assert self._runner.cache.try_start(sequence), "the pool is too small"
            self._sequences.append(sequence)

    def drop(self) -> None:
        for sequence in self._sequences:
            self._runner.cache.release(sequence)
        self._sequences = []

    def decode(self) -> float:
        """Seconds of a step of one token each; the sequences stay as they are."""
        for sequence in self._sequences:
            sequence.num_computed_tokens = sequence.num_tokens - 1
        return self._step([ScheduledSequence(sequence, 1) for sequence in self._sequences])

    def prefill(self) -> float:
        """Seconds for the whole prompts in one step."""
        for sequence in self._sequences:
            sequence.num_computed_tokens = 0
        return self._step([ScheduledSequence(sequence, sequence.num_tokens) for sequence in self._sequences])

    def _step(self, items: list[ScheduledSequence]) -> float:
        begin = self._clock()
        self._runner.run(StepPlan(tuple(items)))
        return self._clock() - begin


def medians(engines: list[Engine], measure: Callable[[Engine], float], runs: int) -> list[float]:
    times: list[list[float]] = [[] for _ in engines]
    for engine in engines:
        measure(engine)
    for _ in range(runs):
        for engine, found in zip(engines, times, strict=True):
            found.append(measure(engine))
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 1500])
    parser.add_argument("--instruction-set", nargs="*", default=[], choices=["avx2", "avx512"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    options = parser.parse_args()
    use_threads(options.threads)
    num_threads = torch.get_num_threads()
    clock = time.perf_counter if options.clock == "wall" else lambda: time.process_time() / num_threads
    largest = max(max(options.batches) * (max(options.contexts) + 16), max(options.prompts) + 16)
    config = EngineConfig(
        model=options.model,
        num_kv_blocks=largest // 16 + max(options.batches),
        enable_prefix_cache=False,
        threads=options.threads,
        cpu_kernels="torch",
    )
    engines = [Engine("torch", config, clock)]
    native = replace(config, cpu_kernels="native")
    for isa in options.instruction_set:
        os.environ[ISA_VARIABLE] = isa
        engines.append(Engine(f"native {isa}", native, clock))
        del os.environ[ISA_VARIABLE]
    if not options.instruction_set:
        engines.append(Engine("native", native, clock))
    gc.freeze()
    names = "".join(f"{engine.name:>16}" for engine in engines)
    print(f"{'milliseconds, tokens/s':32}{names}  last : torch", flush=True)
    for num_tokens in options.contexts:
        for batch in options.batches:
            for engine in engines:
                engine.start(batch, num_tokens)
            found = medians(engines, Engine.decode, options.runs)
            show(f"decode, {batch} x context {num_tokens}", found, batch)
    for num_tokens in options.prompts:
        for engine in engines:
            engine.start(1, num_tokens)
        show(f"prefill, {num_tokens} tokens", medians(engines, Engine.prefill, options.runs), num_tokens)


def show(what: str, seconds: list[float], num_tokens: int) -> None:
    cells = "".join(f"{1e3 * value:8.1f}{num_tokens / value:8.0f}" for value in seconds)
    print(f"{what:32}{cells}  {seconds[0] / seconds[-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
