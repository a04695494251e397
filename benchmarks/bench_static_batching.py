"""Continuous against static batching, with Baton's own engine and scheduler on workload B.

Workload B: 16 requests at once, prompts of 64 to 512 tokens (3,991 in all), outputs of 16 to 256 (2,037 in
all), greedy, the end of sequence ignored. Continuous: a place that becomes free is taken at the next step.
Static: a batch is formed, runs until its longest member is done, and only then the next one begins;
`padded` is static batching as it was first built, in which finished members keep computing until that end.
Only tokens that were asked for count. The same process, model and steps for all; one line each, medians of
`--runs`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from core.ids import RequestId
from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.scheduler import Scheduler
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.runner import ModelRunner, use_threads
from engine.sequence import finish_reason_after, new_sequence

SHAPE_SEED = 1234
MODES = ("continuous", "static", "padded")


@dataclass(frozen=True, slots=True)
class Shape:
    """One request of the workload."""

    num_prompt_tokens: int
    num_output_tokens: int


def workload_b() -> list[Shape]:
    """The lengths are the same in every run and for every server that is compared."""
    generator = random.Random(SHAPE_SEED)
    return [Shape(generator.randint(64, 512), generator.randint(16, 256)) for _ in range(16)]


def make_requests(shapes: Items[Shape], seed: int, vocab_size: int) -> list[Request]:
    """Random prompts that share no prefix, so that no cache helps."""
    generator = random.Random(seed)
    return [
        Request(
            RequestId(f"b-{seed}-{index}"),
            tuple(generator.randrange(1000, vocab_size) for _ in range(shape.num_prompt_tokens)),
            SamplingParams(max_tokens=shape.num_output_tokens, seed=0, temperature=0.0, ignore_eos=True),
        )
        for index, shape in enumerate(shapes)
    ]


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds from the first step to the last, steps, and output tokens that were asked for."""

    seconds: float
    num_steps: int
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Bench:
    """One loaded engine; every run gets a scheduler of its own and leaves the cache cold behind it."""

    def __init__(self, runner: ModelRunner, num_places: int) -> None:
        self._runner = runner
        self._config = DecodeConfig(max_num_seqs=num_places)

    def run(self, mode: str, requests: Items[Request]) -> Result:
        scheduler = Scheduler(self._config, self._runner.cache, frozenset())
        waiting = list(requests)
        num_asked = sum(request.sampling.max_tokens for request in requests)
        num_steps = 0
        start = time.perf_counter()
        while waiting or scheduler.has_work:
            batch, waiting = self._next_batch(mode, waiting, scheduler.has_work)
            for request in batch:
                scheduler.add(new_sequence(request, 0, (), self._runner.max_context))
            self._step(scheduler)
            num_steps += 1
        return Result(time.perf_counter() - start, num_steps, num_asked)

    def _next_batch(
        self, mode: str, waiting: list[Request], is_busy: bool
    ) -> tuple[list[Request], list[Request]]:
        """Who may be scheduled from now on, and who still has to wait for that."""
        if mode == "continuous":
            return waiting, []
        if is_busy:
            return [], waiting
        places = self._config.max_num_seqs
        batch, waiting = waiting[:places], waiting[places:]
        if mode == "padded":
            longest = max(request.sampling.max_tokens for request in batch)
            batch = [
                replace(request, sampling=replace(request.sampling, max_tokens=longest)) for request in batch
            ]
        return batch, waiting

    def _step(self, scheduler: Scheduler) -> None:
        plan = scheduler.schedule()
        assert len(plan), "nothing can run: the pool is too small for the workload"
        output = self._runner.run(plan)
        scheduler.advance(plan, output.streams.token_ids)
        for index in np.flatnonzero(plan.streams.is_ended_by(output.streams.token_ids)).tolist():
            scheduler.remove(plan.streams.sequences[index])
        for item, sampled in zip(plan.chunks, output.sampled, strict=True):
            for token in sampled:
                scheduler.settle_first_samples(item.sequence)
                item.sequence.append(token.token_id)
            if sampled and finish_reason_after(item.sequence, frozenset()) is not None:
                scheduler.remove(item.sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--places", type=int, nargs="*", default=[16, 8, 4], help="sequences that may run at once"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    options = parser.parse_args()
    use_threads(0)
    config = EngineConfig(enable_prefix_cache=False)
    runner = ModelRunner(load_model(config), config)
    runner.warm_up()
    shapes = workload_b()
    for num_places in options.places:
        bench = Bench(runner, num_places)
        results: dict[str, list[Result]] = {mode: [] for mode in options.modes}
        for seed in range(options.runs):
            # one after the other within a run, so that a noisy minute of the machine hits all modes
            for mode in options.modes:
                requests = make_requests(shapes, seed, runner.model_config.vocab_size)
                results[mode].append(bench.run(mode, requests))
        best = statistics.median(result.tokens_per_s for result in results[options.modes[0]])
        for mode, found in results.items():
            rate = statistics.median(result.tokens_per_s for result in found)
            print(
                f"workload B, {num_places} places, {mode}: {rate:.1f} tok/s out, {found[0].num_steps} steps; "
                f"{options.modes[0]} is {best / rate:.2f} times that",
                flush=True,
            )


if __name__ == "__main__":
    main()
