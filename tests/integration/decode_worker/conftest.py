"""A real runner on a toy checkpoint, a decode worker, and a prefill end that reads its own pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from prometheus_client import CollectorRegistry

from core.clock import Clock, MonotonicClock
from core.ids import RequestId, Role, TicketId, WorkerId, WorkerRef, new_epoch
from core.jobs import GenerateEvent, GenerateJob, SampleStart
from core.request import FinishReason, Request, SamplingParams, TokenLogprob
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.runner import ModelRunner
from kv_transfer.loopback import LoopbackDirectory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from tests.integration.decode_worker.prefill_end import PrefillEnd
from tests.oracle import make_toy_checkpoint
from tests.step_gate import StepGate

VOCAB_SIZE = 512


def prompt_ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((5 * i * i + (7 + seed) * i + 3 + 11 * seed) % VOCAB_SIZE for i in range(num_tokens))


@dataclass
class Answer:
    """What a Generate stream said of one sample, checked for order while it is read."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    first_position: int = 0

    def add(self, event: GenerateEvent) -> None:
        delta = event.delta
        assert self.finish_reason is None, "an event after the end"
        if not self.token_ids:
            self.first_position = delta.position
        assert delta.position == self.first_position + len(self.token_ids), "a token is missing or came twice"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.num_cached_tokens = delta.num_cached_tokens
        if event.prompt_logprobs:
            assert not self.prompt_logprobs, "prompt logprobs came twice"
            self.prompt_logprobs = event.prompt_logprobs


@dataclass(frozen=True)
class Site:
    """One decode worker, and a prefill end that reaches it by loopback; `gate` holds the worker's steps."""

    worker: DecodeWorker
    runner: ModelRunner
    gate: StepGate
    prefill: PrefillEnd
    folder: Path

    def request(
        self, token_ids: tuple[int, ...], request_id: str = "r", num_samples: int = 1, **sampling: Any
    ) -> Request:
        params = SamplingParams(**{"max_tokens": 12, "seed": 5, "temperature": 0.0, **sampling})
        return Request(RequestId(request_id), token_ids, params, num_samples=num_samples)

    def job(
        self,
        request: Request,
        *,
        emitted: tuple[int, ...] = (),
        samples: tuple[SampleStart, ...] | None = None,
        ticket_id: TicketId | None = None,
        attempt: int = 0,
        time_left_s: float = 30.0,
    ) -> GenerateJob:
        starts = samples or tuple(SampleStart(index, emitted) for index in range(request.num_samples))
        return GenerateJob(request, starts, ticket_id, attempt, time_left_s)

    async def answers(self, job: GenerateJob) -> dict[int, Answer]:
        """Read the whole stream, by sample."""
        found = {sample.sample_index: Answer() for sample in job.samples}
        async for event in self.worker.generate(job):
            found[event.delta.sample_index].add(event)
        assert all(answer.finish_reason is not None for answer in found.values())
        return found

    async def answer(self, job: GenerateJob) -> Answer:
        return (await self.answers(job))[job.samples[0].sample_index]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll for what another thread brings about and nothing takes away again; what might pass by unseen
        is held at the gate instead.
        """
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 (another thread raises no event of this loop)
                await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Wait until no block is held, checking all holders all the while; then see the gauges fall."""
        async with asyncio.timeout(5):
            while self.runner.cache.allocator.num_held:
                await self.worker.check()
                await asyncio.sleep(0.005)
        await self.worker.check()
        await self.until(lambda: self.value("baton_num_running") == self.value("baton_num_waiting") == 0)
        await self.until(lambda: self.value("baton_kv_utilization") == 0)

    def value(self, name: str, **labels: str) -> float:
        found = self.worker.registry.get_sample_value(name, {"role": "decode", "model": "", **labels})
        assert found is not None, name
        return found

    @property
    def num_open_streams(self) -> int:
        """Streams that run, with listeners or within the grace after them."""
        return self.worker._streams.num_running

    def num_ended(self, state: str) -> float:
        labels = {"role": "decode", "state": state}
        found = self.worker.registry.get_sample_value("baton_tickets_ended_total", labels)
        assert found is not None
        return found

    def num_received_bytes(self) -> float:
        name, labels = "baton_kv_transfer_bytes_total", {"transport": "loopback"}
        return self.worker.registry.get_sample_value(name, labels) or 0.0


MakeSite = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(checkpoint), threads=1))


@pytest.fixture
async def make_site(loaded: LoadedModel, checkpoint: Path) -> AsyncIterator[MakeSite]:
    """Makes started sites; at the end each is stopped, and has lost no block."""
    torch.set_num_threads(1)
    sites: list[Site] = []

    async def make(
        num_kv_blocks: int = 64,
        max_context: int = 0,
        clock: Clock | None = None,
        overlap: Literal["on", "off"] = "off",
        **config: Any,
    ) -> Site:
        engine = EngineConfig(
            model=str(checkpoint),
            num_kv_blocks=num_kv_blocks,
            max_context=max_context,
            threads=1,
            overlap=overlap,
        )
        own = replace(loaded, max_context=max_context) if max_context else loaded
        runner, other = ModelRunner(own, engine), ModelRunner(own, replace(engine, num_kv_blocks=128))
        ref = WorkerRef(WorkerId("d0"), Role.DECODE, new_epoch(), "loopback:d0")
        worker = DecodeWorker(runner, DecodeConfig(**config), ref, clock or MonotonicClock())
        directory = LoopbackDirectory()
        directory.register(ref.worker_id, worker.receiver)
        prefill_ref = WorkerRef(WorkerId("p0"), Role.PREFILL, new_epoch(), "loopback:p0")
        sender = Sender(
            other.cache.pool,
            prefill_ref,
            directory.connect,
            MonotonicClock(),
            TransferMetrics(CollectorRegistry()),
        )
        await worker.start()
        prefill = PrefillEnd(other, sender, prefill_ref, ref)
        sites.append(Site(worker, runner, StepGate(runner), prefill, checkpoint))
        return sites[-1]

    yield make
    for site in sites:
        site.gate.release()
    for site in sites:
        await site.prefill.close()
        await site.worker.stop()
        site.runner.cache.allocator.check([])
