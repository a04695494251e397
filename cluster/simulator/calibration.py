"""Calibration: the real engine runs steps of many sizes, and their price is what a simulation charges.

Owns which steps are run. On the main thread, with the machine to itself if the numbers are to mean anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulator.fit import Measured, fit_price
from cluster.simulator.profile import Profile
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import LinkPrice, StepPrice, features_of
from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.runner import ModelRunner
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan

# half of the cores, but for what streams leave to whoever reads (`engine.pace`)
_ASSUMED_READING = 1.6


@dataclass(frozen=True, slots=True)
class Grid:
    """Steps to run, each `runs` times: `batches` of streams at `contexts`, and chunks of `prompts` tokens
    behind `contexts`.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (64, 512, 1500)
    prompts: tuple[int, ...] = (16, 64, 256, 512)
    runs: int = 5


def unmeasured(config: EngineConfig, link: LinkPrice) -> Profile:
    """What a worker with this configuration is, with step prices that nobody has measured, and what sharing
    cores is thought to cost.
    """
    runner = ModelRunner(load_model(config), config)
    num_cores = runner.num_shared_cores
    return Profile(
        runner.layout,
        runner.cache.allocator.num_blocks,
        runner.max_context,
        StepPrice(1.0, 0.0, 0.0, 0.0, 0.0),
        link,
        sharing=Sharing(num_cores, _ASSUMED_READING, config.decode_stretch) if num_cores else None,
    )


class Calibration:
    """`config`: of the engine, as workers would have it. `tell` hears what is being measured."""

    def __init__(self, config: EngineConfig, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._runner = ModelRunner(load_model(config), config)
        self._runner.warm_up()
        # memory that was never written is not really read
        self._runner.cache.pool.tensor.fill_(0)

    def measure(self, grid: Grid, link: LinkPrice) -> Profile:
        """Run the grid as far as it fits the pool and the context, and fit a price to it."""
        steps = [
            self._step([num_context] * batch, 1, grid.runs)
            for num_context in grid.contexts
            for batch in grid.batches
            if self._fits(num_context + 1, batch)
        ]
        steps += [
            self._step([num_context], num_tokens, grid.runs)
            for num_context in (0, *grid.contexts)
            for num_tokens in grid.prompts
            if self._fits(num_context + num_tokens, 1)
        ]
        price, error = fit_price(steps)
        cache = self._runner.cache
        return Profile(cache.layout, cache.allocator.num_blocks, self._runner.max_context, price, link, error)

    def _fits(self, num_tokens: int, num_sequences: int) -> bool:
        num_blocks = self._runner.layout.num_blocks(num_tokens) * num_sequences
        return num_tokens < self._runner.max_context and num_blocks <= self._runner.cache.allocator.num_blocks

    def _step(self, contexts: list[int], num_new: int, runs: int) -> Measured:
        sequences = [self._sequence(index, num + num_new) for index, num in enumerate(contexts)]
        plan = StepPlan(tuple(ScheduledSequence(sequence, num_new) for sequence in sequences))
        times = []
        for _ in range(runs + 1):
            for sequence, num_context in zip(sequences, contexts, strict=True):
                sequence.num_computed_tokens = num_context
            began = time.perf_counter()
            self._runner.run(plan)
            times.append(time.perf_counter() - began)
        features = features_of(plan)
        for sequence in sequences:
            self._runner.cache.release(sequence)
        seconds = statistics.median(times[1:])
        self._tell(f"{len(contexts)} × {num_new} tokens behind {contexts[0]}: {1e3 * seconds:.2f} ms")
        return Measured(features, seconds)

    def _sequence(self, index: int, num_tokens: int) -> Sequence:
        vocab_size = self._runner.model_config.vocab_size
        ids = tuple((7 * position + index) % (vocab_size // 2) for position in range(num_tokens))
        request = Request(RequestId(f"c{index}"), ids, SamplingParams(max_tokens=1, seed=0, temperature=0.0))
        sequence = new_sequence(request, 0, (), self._runner.max_context)
        self._runner.cache.enable_prefix_cache = False
        assert self._runner.cache.try_start(sequence), "the pool is too small"
        return sequence
