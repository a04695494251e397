"""A real runner on a toy checkpoint, a prefill worker, and a decode end over loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt
import pytest
import torch
from prometheus_client import CollectorRegistry

from core.clock import Clock, MonotonicClock
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.jobs import PrefillJob, SampleStart
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.runner import ModelRunner
from kv_transfer.grpc_transport import GrpcTransport, add_kv_transfer_servicer
from kv_transfer.loopback import LoopbackDirectory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.transport import Connect
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protos.grpc_options import SERVER_OPTIONS
from tests.integration.prefill_worker.decode_end import DecodeEnd
from tests.oracle import load_oracle, make_toy_checkpoint
from tests.step_gate import StepGate

VOCAB_SIZE = 512


def prompt_ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((5 * i * i + (7 + seed) * i + 3 + 11 * seed) % VOCAB_SIZE for i in range(num_tokens))


@dataclass(frozen=True)
class Site:
    """One prefill worker and one decode end, joined by loopback; `gate` holds the worker's steps."""

    worker: PrefillWorker
    runner: ModelRunner
    gate: StepGate
    decode: DecodeEnd
    decode_ref: WorkerRef
    folder: Path

    def job(
        self,
        token_ids: tuple[int, ...],
        *,
        emitted: tuple[int, ...] = (),
        num_samples: int = 1,
        time_left_s: float = 30.0,
        is_handed_over: bool = True,
        request_id: str = "r",
        **sampling: Any,
    ) -> PrefillJob:
        params = SamplingParams(**{"max_tokens": 8, "seed": 5, "temperature": 0.0, **sampling})
        samples = tuple(SampleStart(index, emitted) for index in range(num_samples))
        return PrefillJob(
            Request(RequestId(request_id), token_ids, params, num_samples=num_samples),
            samples,
            new_ticket_id(),
            self.decode_ref if is_handed_over else None,
            attempt=0,
            time_left_s=time_left_s,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll for what another thread brings about and nothing takes away again; what might pass by unseen
        is held at the gate instead.
        """
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 (another thread raises no event of this loop)
                await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Wait until all calls have ended and no block is held, checking every block's holders meanwhile;
        then see the gauges fall.
        """
        async with asyncio.timeout(5):
            while self.worker.num_calls or self.runner.cache.allocator.num_held:
                await self.worker.check()
                await asyncio.sleep(0.005)
        await self.worker.check()
        await self.until(lambda: not self.value("baton_num_running") and not sum(self.tickets().values()))

    def value(self, name: str, **labels: str) -> float:
        found = self.worker.registry.get_sample_value(name, {"role": "prefill", "model": "", **labels})
        assert found is not None, name
        return found

    def tickets(self) -> dict[str, float]:
        """Tickets under way by state."""
        return {
            sample.labels["state"]: sample.value
            for family in self.worker.registry.collect()
            if family.name == "baton_tickets"
            for sample in family.samples
        }

    def num_ended(self, state: str) -> float:
        found = self.worker.registry.get_sample_value(
            "baton_tickets_ended_total", {"role": "prefill", "state": state}
        )
        assert found is not None
        return found


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
    servers: list[grpc.aio.Server] = []

    async def make(
        num_kv_blocks: int = 64, is_grpc: bool = False, clock: Clock | None = None, **config: Any
    ) -> Site:
        engine = EngineConfig(model=str(checkpoint), num_kv_blocks=num_kv_blocks, threads=1)
        runner = ModelRunner(loaded, engine)
        directory, decode = LoopbackDirectory(), DecodeEnd()
        connect: Connect = GrpcTransport if is_grpc else directory.connect
        server = grpc.aio.server(options=SERVER_OPTIONS)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" if is_grpc else "loopback:d0"
        decode_ref = WorkerRef(WorkerId("d0"), Role.DECODE, new_epoch(), address)
        receiver = Receiver(decode, decode_ref, runner.layout, TransferMetrics(CollectorRegistry()))
        if is_grpc:
            add_kv_transfer_servicer(server, receiver)
            await server.start()
            servers.append(server)
        else:
            directory.register(decode_ref.worker_id, receiver)
        worker = PrefillWorker(
            runner,
            PrefillConfig(**config),
            WorkerRef(WorkerId("p0"), Role.PREFILL, new_epoch(), "loopback:p0"),
            clock or MonotonicClock(),
            connect,
        )
        await worker.start()
        sites.append(Site(worker, runner, StepGate(runner), decode, decode_ref, checkpoint))
        return sites[-1]

    yield make
    for site in sites:
        site.gate.release()
    for site in sites:
        started = time.monotonic()
        await site.worker.stop()
        assert time.monotonic() - started < 5, "stopping takes no longer than the last words to decode"
        site.runner.cache.allocator.check([])
    for server in servers:
        await server.stop(grace=None)


def oracle_kv(folder: Path, token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The reference's keys and values: `[num_layers, 2, num_kv_heads, num_tokens, head_dim]`."""
    with torch.inference_mode():
        cache = load_oracle(folder)(torch.tensor([list(token_ids)]), use_cache=True).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    kv: npt.NDArray[np.float32] = torch.stack(layers).float().numpy()
    return kv
