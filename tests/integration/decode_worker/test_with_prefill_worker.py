"""A prefill and a decode worker joined by gRPC and mutual TLS, with and without shared memory: the split
gives what one box gives, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from core.clock import MonotonicClock
from core.errors import ServingError
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.jobs import CancelJob, GenerateJob, PrefillJob, SampleStart
from core.peer_security import PeerSecurity, new_cluster_token
from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.service import serve
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel
from engine.runner import ModelRunner
from kv_transfer.config import BridgeConfig, ReceiverConfig
from kv_transfer.shm_transport import connect_as_configured
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.integration.certificates import Authority
from tests.integration.decode_worker.conftest import prompt_ids
from tests.integration.kv_transfer.ends import WAYS
from tests.oracle import oracle_greedy

MAX_TOKENS = 10


@dataclass(frozen=True)
class Pair:
    prefill: PrefillWorker
    decode: DecodeWorker
    runners: tuple[ModelRunner, ModelRunner]
    way: str

    async def tokens(self, ids: tuple[int, ...], name: str, cancel_after: int | None = None) -> list[int]:
        """What a router would do: Prefill, then Generate on its ticket."""
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=1, temperature=0.0)
        request = Request(RequestId(name), ids, sampling)
        ticket_id = new_ticket_id()
        job = PrefillJob(request, (SampleStart(0),), ticket_id, self.decode.ref, 1, 30.0)
        result = await self.prefill.prefill(job)
        tokens = list(result.deltas[0].token_ids)
        if result.deltas[0].finish_reason is not None:
            return tokens
        generate = GenerateJob(request, (SampleStart(0, tuple(tokens)),), ticket_id, 1, 30.0)
        async with aclosing(self.decode.generate(generate)) as events:
            async for event in events:
                tokens += event.delta.token_ids
                if cancel_after is not None and len(tokens) > cancel_after:
                    await self.decode.cancel(CancelJob(request.request_id, ticket_id))
        return tokens

    async def settle(self) -> None:
        async with asyncio.timeout(10):
            while any(runner.cache.allocator.num_held for runner in self.runners):
                await self.prefill.check()
                await self.decode.check()
                await asyncio.sleep(0.01)


@pytest.fixture(params=["grpc", "shm", "distributed"])
async def pair(loaded: LoadedModel, checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    engine = EngineConfig(model=str(checkpoint), num_kv_blocks=96, threads=1)
    runners = ModelRunner(loaded, engine), ModelRunner(loaded, engine)
    clock = MonotonicClock()
    ref = WorkerRef(WorkerId("d"), Role.DECODE, new_epoch(), "")
    way = WAYS[request.param]
    offered = DecodeConfig(bridge=ReceiverConfig(distributed=way["distributed"]))
    decode = DecodeWorker(runners[1], offered, ref, clock)
    await decode.start()
    security = PeerSecurity(new_cluster_token(), Authority().identity())
    server, port = await serve(decode, "127.0.0.1", security)
    decode.ref = replace(ref, address=f"127.0.0.1:{port}")
    own = WorkerRef(WorkerId("p"), Role.PREFILL, new_epoch(), "")
    config = PrefillConfig(token_budget=32, bridge=BridgeConfig(**way))
    connect = connect_as_configured(config.bridge, security, runners[0].pair_groups("127.0.0.1"))
    prefill = PrefillWorker(runners[0], config, own, clock, connect)
    await prefill.start()
    yield Pair(prefill, decode, runners, request.param)
    await prefill.stop()
    await decode.stop()
    await server.stop(1.0)
    for runner in runners:
        runner.cache.allocator.check([])


async def test_many_prompts_through_both_workers_are_the_references(pair: Pair, checkpoint: Path) -> None:
    chance = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 101, *(chance.randrange(1, 150) for _ in range(21))]
    prompts = [prompt_ids(length, seed) for seed, length in enumerate(lengths)]
    places = asyncio.Semaphore(6)

    async def run(index: int, turn: int) -> None:
        async with places:
            tokens = await pair.tokens(prompts[index], f"r{turn}.{index}")
        assert tokens == oracle_greedy(checkpoint, prompts[index], MAX_TOKENS, eos=(2,)), lengths[index]

    order = list(range(len(prompts)))
    chance.shuffle(order)
    await asyncio.gather(*(run(index, 0) for index in order))
    await asyncio.gather(*(run(index, 1) for index in order[-10:]))
    await pair.settle()
    received = pair.decode.registry.get_sample_value("baton_kv_transfer_bytes_total", {"transport": pair.way})
    assert received is not None
    num_blocks, rest = divmod(received, pair.runners[1].layout.block_bytes)
    assert rest == 0
    offered = [lengths[index] for index in (*order, *order[-10:])]
    assert 0 < num_blocks < sum(-(-length // 16) for length in offered), "cached blocks were sent again"


async def test_requests_cancelled_at_any_moment_leave_no_block_on_either_side(pair: Pair) -> None:
    chance = random.Random(7)

    async def run(index: int) -> None:
        ids = prompt_ids(chance.randrange(1, 150), index)
        call = asyncio.create_task(pair.tokens(ids, f"r{index}", cancel_after=chance.randrange(1, 20)))
        await asyncio.sleep(chance.random() * 0.2)
        if chance.random() < 0.5:
            call.cancel()
        try:
            await call
        except (asyncio.CancelledError, ServingError):
            return

    await asyncio.gather(*(run(index) for index in range(40)))
    await pair.settle()
