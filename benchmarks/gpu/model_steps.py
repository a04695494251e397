"""Steps of a random model: streams that decode, prompts that are read, and the device's busy time.

Owns the sequences of a measurement and the calls of the runner.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.random_model import RandomModel
from core.ids import RequestId
from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.scheduler import Scheduler
from engine.runner import ModelRunner
from engine.running_step import RunningStep
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan


def make_sequence(model: RandomModel, index: int, num_tokens: int, max_tokens: int) -> Sequence:
    """With blocks for all its tokens, nothing computed; greedy, never ended by the model."""
    vocab = model.config.vocab_size
    ids = tuple((7919 * i + 31 * index) % vocab for i in range(num_tokens))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        temperature=0.0,
        ignore_eos=True,
        logprobs=1 if max_tokens == 1 else None,
    )
    request = Request(RequestId(f"r{index}"), ids, sampling)
    sequence = new_sequence(request, 0, (), model.runner.max_context)
    assert model.runner.cache.try_start(sequence, max_tokens), "the pool is too small"
    return sequence


class Steps:
    """`batch` streams of `context` tokens, whose KV is taken as computed: it does not change the time."""

    def __init__(self, model: RandomModel, batch: int, context: int, max_steps: int) -> None:
        self._runner = model.runner
        config = DecodeConfig(max_num_seqs=batch, token_budget=batch)
        self._scheduler = Scheduler(config, model.runner.cache, frozenset())
        for index in range(batch):
            sequence = make_sequence(model, index, context, max_steps)
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.append(index)
            self._scheduler.adopt(sequence)

    def measure(self, num_steps: int) -> tuple[float, float]:
        """Seconds of a step, and in how many of them the device works (NaN without one). A quarter as many
        steps warm up.
        """
        self._run(num_steps // 4 + 1)
        begin = time.perf_counter()
        self._run(num_steps)
        seconds = (time.perf_counter() - begin) / num_steps
        if not torch.cuda.is_available():
            return seconds, math.nan
        return seconds, busy_seconds(lambda: self._run(num_steps)) / num_steps

    def close(self) -> None:
        for sequence in self._scheduler.running:
            self._scheduler.remove(sequence)

    def _run(self, num_steps: int) -> None:
        """As a decode worker does: a step is planned and started while the one before runs, whose tokens stay
        on the device.
        """
        plan = self._scheduler.schedule()
        running = self._start(plan)
        for _ in range(num_steps - 1):
            following = self._scheduler.try_schedule_ahead()
            assert following is not None
            started = self._start(following)
            self._finish(plan, running)
            plan, running = following, started
        self._finish(plan, running)
        synchronize()

    def _start(self, plan: StepPlan) -> RunningStep:
        self._scheduler.begin(plan)
        return self._runner.start(plan)

    def _finish(self, plan: StepPlan, running: RunningStep) -> None:
        output = running.result()
        self._scheduler.end(plan)
        self._scheduler.advance(plan, output.streams.token_ids)


def busy_seconds(call: Callable[[], None]) -> float:
    """How long at least one kernel or copy runs during `call`."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    total, last = 0.0, -math.inf
    for begin, end in spans:
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total / 1e6 if spans else math.nan


def prefill_seconds(model: RandomModel, num_tokens: int, runs: int) -> float:
    """Median of a whole prompt in one step."""
    sequence = make_sequence(model, 0, num_tokens, 1)
    times = []
    for _ in range(runs + 1):
        sequence.num_computed_tokens = 0
        begin = time.perf_counter()
        read(model.runner, sequence, num_tokens)
        synchronize()
        times.append(time.perf_counter() - begin)
    model.runner.cache.release(sequence)
    return statistics.median(times[1:])


def split_error(model: RandomModel, prompts: Items[int]) -> float:
    """The largest difference between log-probabilities of a next token: a prompt read at once, or all but its
    last token and then that one as a decode step does.
    """
    worst = 0.0
    for index, num_tokens in enumerate(prompts):
        whole = make_sequence(model, index, num_tokens, 1)
        expected = read(model.runner, whole, num_tokens)
        parts = make_sequence(model, index, num_tokens, 1)
        assert read(model.runner, parts, num_tokens - 1) is None
        parts.num_computed_tokens = num_tokens - 1
        found = read(model.runner, parts, 1)
        assert expected is not None
        assert found is not None
        worst = max(worst, abs(found - expected))
        for sequence in (whole, parts):
            model.runner.cache.release(sequence)
    return worst


def read(runner: ModelRunner, sequence: Sequence, num_tokens: int) -> float | None:
    """Compute so many tokens; the best next token's log-probability if they are the last."""
    output = runner.run(StepPlan((ScheduledSequence(sequence, num_tokens),)))
    if not output.sampled[0]:
        return None
    logprob = output.sampled[0][0].logprob
    assert logprob is not None
    return logprob.logprob


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
