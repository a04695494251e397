"""Real workers whose blocks have different sizes: right tokens, prefix hits by each one's own names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.clock import MonotonicClock
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from core.peer_security import PeerSecurity
from decode_worker.config import DecodeConfig
from decode_worker.service import serve
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel
from engine.runner import ModelRunner
from kv_transfer.config import BridgeConfig
from kv_transfer.shm_transport import connect_as_configured
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.integration.decode_worker.conftest import prompt_ids
from tests.integration.decode_worker.test_with_prefill_worker import MAX_TOKENS, Pair
from tests.oracle import oracle_greedy


@pytest.fixture(params=[(16, 32), (32, 8)])
async def pair(loaded: LoadedModel, checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    engine = EngineConfig(model=str(checkpoint), threads=1)
    runners = tuple(
        ModelRunner(loaded, replace(engine, block_size=size, num_kv_blocks=1536 // size))
        for size in request.param
    )
    clock, security = MonotonicClock(), PeerSecurity()
    ref = WorkerRef(WorkerId("d"), Role.DECODE, new_epoch(), "")
    decode = DecodeWorker(runners[1], DecodeConfig(), ref, clock)
    await decode.start()
    server, port = await serve(decode, "127.0.0.1", security)
    decode.ref = replace(ref, address=f"127.0.0.1:{port}")
    own = WorkerRef(WorkerId("p"), Role.PREFILL, new_epoch(), "")
    config = PrefillConfig(token_budget=32, bridge=BridgeConfig())
    prefill = PrefillWorker(runners[0], config, own, clock, connect_as_configured(config.bridge, security))
    await prefill.start()
    yield Pair(prefill, decode, (runners[0], runners[1]), "shm")
    await prefill.stop()
    await decode.stop()
    await server.stop(1.0)
    for runner in runners:
        runner.cache.allocator.check([])


def received(pair: Pair) -> float:
    labels = {"transport": "shm"}
    return pair.decode.registry.get_sample_value("baton_kv_transfer_bytes_total", labels) or 0.0


async def test_prompts_of_all_lengths_are_the_references(pair: Pair, checkpoint: Path) -> None:
    lengths = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 101, 140]
    prompts = [prompt_ids(length, 40 + length) for length in lengths]
    answers = await asyncio.gather(*(pair.tokens(ids, f"r{len(ids)}") for ids in prompts))
    for ids, tokens in zip(prompts, answers, strict=True):
        assert tokens == oracle_greedy(checkpoint, ids, MAX_TOKENS, eos=(2,)), len(ids)
    await pair.settle()
    block_bytes = pair.runners[1].layout.block_bytes
    assert received(pair) > 0
    assert received(pair) % block_bytes == 0


async def test_what_decode_holds_of_a_prompt_is_found_by_its_own_names_and_not_sent_again(
    pair: Pair, checkpoint: Path
) -> None:
    ids = prompt_ids(130, 7)
    first = await pair.tokens(ids, "first")
    await pair.settle()
    before, block_bytes = received(pair), pair.runners[1].layout.block_bytes
    assert await pair.tokens(ids, "second") == first
    await pair.settle()
    assert received(pair) - before == block_bytes, "only the tail"
    longer = (*ids, *prompt_ids(40, 8))
    assert await pair.tokens(longer, "longer") == oracle_greedy(checkpoint, longer, MAX_TOKENS, eos=(2,))
