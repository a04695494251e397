"""Host time of one steady decode step: all that the step thread does beside the device's work.

The real decode loop, scheduler, cache, inbox, runner and sampler over a device that computes nothing: hidden
rows and logits are constants, so what is left is planning, batch building, the attention plan, sampling rows,
results, deliveries, metrics and the tick. One line for each number of sequences: median and 95th percentile
of a step, the median for one sequence, and as a column of its own what the IO loop pays to fan one step out
to its listeners (until each of them has read its event; no network). Beside it, the growth against the line
before: 2.0 is linear.

Contexts are spread over the places in a block, so that each step as many sequences cross a block's border as
in a long run. `--clock cpu` shows the step thread's processor time, which other work on the machine does not
stretch.

`--device-ms` lets each step end so much after its start, or after the end of the one before, as on a device
that works by itself; the last column is then the time from one step's tokens to the next, all of them handed
to their listeners. `--overlap on` starts each step before the one before is read.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import cast

import torch
from prometheus_client import CollectorRegistry

from core.clock import Deadline, MonotonicClock
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch
from core.jobs import GenerateJob, SampleStart
from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.decode_loop import DecodeLoop
from decode_worker.metrics import TicketMetrics
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery
from decode_worker.streams import Streams
from engine.config import EngineConfig
from engine.executor import Pending
from engine.loaded_model import LoadedModel
from engine.metrics import EngineMetrics
from engine.model.config import ModelConfig
from engine.model.source import resolve_model
from engine.model.transformer import Transformer
from engine.native.choice import choose_ops
from engine.runner import ModelRunner
from engine.running_step import RunningStep
from engine.sampling import SampledColumns, Sampler
from engine.step import StepLimits, StepPlan
from kv_transfer.feed import Feed

_VOCAB_SIZE = 16  # so few that the sampler's operators are calls and no work
_TOKEN_ID = 12  # what the device answers
_ANOTHER_S = 1e6


class IdleDevice:
    """A transformer without work: constant hidden rows, constant logits."""

    def __init__(self) -> None:
        self._hidden = torch.zeros(1, 1)
        logits = torch.arange(_VOCAB_SIZE, dtype=torch.float32) / _VOCAB_SIZE
        logits[_TOKEN_ID] = 10.0
        self._logits = logits[None]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        return self._hidden.expand(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.repeat(len(hidden), 1)


class DeviceTime:
    """Steps take `seconds`, one after the other, while the host goes on."""

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        self._start = runner.start
        self._seconds = seconds
        self._free_at = 0.0
        runner.start = self.start  # type: ignore[method-assign]

    def start(self, plan: StepPlan) -> RunningStep:
        begins_at = max(time.perf_counter(), self._free_at)
        running = self._start(plan)
        self._free_at = begins_at + self._seconds
        return replace(running, drawn=Arriving(running.drawn, self._free_at))


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tokens that are on the host from `at` on."""

    drawn: Pending[SampledColumns]
    at: float

    def settled(self) -> SampledColumns:
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return self.drawn.settled()


def make_runner(num_sequences: int, max_tokens: int, options: argparse.Namespace) -> ModelRunner:
    """A runner whose device is idle, with room for all sequences to their end."""
    config = EngineConfig(
        num_kv_blocks=num_sequences * (max_tokens // 16 + 2),
        threads=1,
        cpu_kernels=options.cpu_kernels,
        overlap=options.overlap,
    )
    folder = resolve_model(config.model)
    real = ModelConfig.from_folder(folder)
    ops = choose_ops(config, real)  # names the attention backend, whose plan is host work
    model = replace(real, vocab_size=_VOCAB_SIZE, num_layers=1, head_dim=1, eos_token_ids=frozenset({2}))
    device = torch.device("cpu")
    transformer = cast(Transformer, IdleDevice())
    loaded = LoadedModel(folder, model, transformer, real.max_context, device, ops)
    runner = ModelRunner(loaded, config, StepLimits(max_sequences=num_sequences))
    runner._sampler = Sampler(tile_rows=num_sequences)  # as on a GPU: rows of a kind go together
    if options.device_ms:
        DeviceTime(runner, options.device_ms / 1e3)
    return runner


class Bench:
    """A decode loop with `num_sequences` running streams, and a listener on each."""

    def __init__(
        self, num_sequences: int, num_prompt_tokens: int, num_steps: int, options: argparse.Namespace
    ):
        self.num_sequences = num_sequences
        clock = MonotonicClock()
        max_tokens = num_prompt_tokens + 32 + num_steps
        config = DecodeConfig(
            max_num_seqs=num_sequences,
            token_budget=num_sequences * max_tokens,
            prefill_chunk=num_sequences * max_tokens,
            max_waiting=num_sequences,
        )
        ref = WorkerRef(WorkerId("d"), Role.DECODE, new_epoch(), "")
        registry = CollectorRegistry()
        runner = make_runner(num_sequences, max_tokens, options)
        self.loop = DecodeLoop(
            runner,
            config,
            ref,
            clock,
            self._take,
            EngineMetrics(registry, ref.role, "idle"),
            TicketMetrics(registry),
        )
        self.is_ahead = runner.is_overlapped
        self.feed = Feed(ref.epoch)
        runner.cache.allocator.on_events = self.feed.append
        self.streams = Streams(config, clock, lambda stream: None)
        self.deliveries: list[tuple[Sequence[Delivery], Sequence[StepTokens]]] = []
        self.num_unread = 0
        self.is_read = asyncio.Event()
        sampling = SamplingParams(max_tokens=num_steps + 2, seed=1, temperature=options.temperature)
        self.jobs = [
            self._job(index, num_prompt_tokens + index % 16, sampling) for index in range(num_sequences)
        ]
        self.clock = clock

    def _job(self, index: int, num_tokens: int, sampling: SamplingParams) -> GenerateJob:
        name = tuple(int(digit) + 3 for digit in f"{index:04}")  # prompts differ from their first block on
        ids = name + tuple((7 * i + index) % 10 + 3 for i in range(num_tokens - len(name)))
        request = Request(RequestId(f"r{index}"), ids, sampling)
        return GenerateJob(request, (SampleStart(0),), None, 0, _ANOTHER_S)

    def _take(self, deliveries: Sequence[Delivery], tokens: Sequence[StepTokens]) -> None:
        self.deliveries.append((deliveries, tokens))

    async def start(self) -> None:
        self.feed.start(asyncio.get_running_loop())
        self.listeners = [asyncio.create_task(self._listen(job)) for job in self.jobs]
        await asyncio.sleep(0)
        for job in self.jobs:
            stream, is_new = self.streams.open(job)
            assert not is_new
            self.loop.begin(job, stream, Deadline.after(_ANOTHER_S, self.clock))
        self.step()
        await self.fan_out()
        if self.is_ahead:
            assert self.loop.step()  # brings nothing: it stays one step ahead from here on
        assert self.loop.status().num_running == self.num_sequences

    async def _listen(self, job: GenerateJob) -> None:
        stream, _ = self.streams.open(job)
        async for event in stream.follow(job):
            self.num_unread -= len(event.delta.token_ids)
            if self.num_unread == 0:
                self.is_read.set()

    def step(self) -> None:
        self.loop.tick()
        assert self.loop.step()
        assert len(self.deliveries) == 1, "a step failed"

    async def fan_out(self) -> None:
        self.num_unread = self.num_sequences
        self.is_read.clear()
        for deliveries, tokens in self.deliveries:
            self.streams.deliver(deliveries, tokens)
        self.deliveries.clear()
        await self.is_read.wait()

    async def measure(self, num_steps: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of each fan-out."""
        steps, fans = [], []
        for _ in range(num_steps):
            begin = clock()
            self.step()
            middle = clock()
            await self.fan_out()
            steps.append(middle - begin)
            fans.append(clock() - middle)
        return steps, fans

    async def stop(self) -> None:
        for listener in self.listeners:
            listener.cancel()
        await asyncio.gather(*self.listeners, return_exceptions=True)
        self.feed.close()


async def run(options: argparse.Namespace) -> None:
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    names = f"{'sequences':>9} {'p50 ms':>8} {'p95 ms':>8} {'µs/seq':>8} {'growth':>7}"
    print(f"{names} | {'IO p50 ms':>9} {'µs/seq':>7}" + (" | interval ms" if options.device_ms else ""))
    before = 0.0
    for num_sequences in options.batches:
        bench = Bench(num_sequences, options.context, options.steps + options.warm_up, options)
        await bench.start()
        await bench.measure(options.warm_up, clock)
        gc.collect()
        gc.freeze()
        steps, fans = await bench.measure(options.steps, clock)
        await bench.stop()
        gc.unfreeze()
        p50, fan = statistics.median(steps), statistics.median(fans)
        p95 = statistics.quantiles(steps, n=20)[-1]
        growth = f"{p50 / before:7.2f}" if before else f"{'':7}"
        host = (
            f"{num_sequences:9} {1e3 * p50:8.3f} {1e3 * p95:8.3f} {1e6 * p50 / num_sequences:8.2f} {growth}"
        )
        line = f"{host} | {1e3 * fan:9.3f} {1e6 * fan / num_sequences:7.2f}"
        if options.device_ms:
            line += f" | {1e3 * statistics.median(map(add, steps, fans)):11.3f}"
        print(line, flush=True)
        before = p50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--context", type=int, default=256, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cpu-kernels", default="auto", choices=["auto", "torch", "native"])
    parser.add_argument("--overlap", default="off", choices=["on", "off"])
    parser.add_argument("--device-ms", type=float, default=0.0, help="0: the device takes no time")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
