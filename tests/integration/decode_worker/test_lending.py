"""A decode worker lends cached blocks to a prefill worker, over gRPC and mutual TLS, with and without shared
memory: the prompt that follows is read from there, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from core.block_hash import BlockHash, hash_blocks
from core.clock import MonotonicClock
from core.errors import ReservationRefused, StaleEpoch, TransferTimeout
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.jobs import CancelJob, GenerateJob, LendJob, LendResult, PrefillJob, SampleStart
from core.peer_security import PeerSecurity, new_cluster_token
from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.service import serve as serve_decode
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel
from engine.runner import ModelRunner
from kv_transfer.config import BridgeConfig, ReceiverConfig
from kv_transfer.shm_transport import connect_as_configured
from prefill_worker.config import PrefillConfig
from prefill_worker.service import serve as serve_prefill
from prefill_worker.worker import PrefillWorker
from router.worker_clients import GrpcWorker
from tests.integration.certificates import Authority
from tests.integration.decode_worker.conftest import prompt_ids
from tests.integration.kv_transfer.ends import WAYS
from tests.oracle import oracle_greedy

MAX_TOKENS = 40
BLOCK = 16


@dataclass(frozen=True)
class Pair:
    """Both workers, and the router's end of the connection to decode."""

    prefill: PrefillWorker
    decode: DecodeWorker
    lender: GrpcWorker
    way: str

    async def answer(self, ids: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        """Decode reads and answers by itself; prompt and answer are cached there afterwards."""
        job = GenerateJob(_request(ids, max_tokens), (SampleStart(0),), None, 1, 30.0)
        tokens: tuple[int, ...] = ()
        async with aclosing(self.decode.generate(job)) as events:
            async for event in events:
                tokens += event.delta.token_ids
        return tokens

    def job(self, ids: tuple[int, ...], time_left_s: float = 30.0) -> LendJob:
        return LendJob(RequestId("r"), new_ticket_id(), self.names(ids), self.prefill.ref, time_left_s)

    def names(self, ids: tuple[int, ...]) -> tuple[BlockHash, ...]:
        cache = self.decode._runner.cache
        return tuple(hash_blocks(cache.hash_root(_request(ids)), ids, BLOCK))

    async def first_token(self, ids: tuple[int, ...]) -> tuple[int, int]:
        """The first token as prefill reads it, and how many tokens of the prompt it found cached."""
        job = PrefillJob(_request(ids), (SampleStart(0),), new_ticket_id(), None, 1, 30.0)
        result = await self.prefill.prefill(job)
        return result.deltas[0].token_ids[0], result.num_cached_tokens

    def num_received_bytes(self) -> float:
        name, labels = "baton_kv_transfer_bytes_total", {"transport": self.way}
        return self.prefill.registry.get_sample_value(name, labels) or 0.0

    async def settle(self) -> None:
        async with asyncio.timeout(10):
            while any(worker._runner.cache.allocator.num_held for worker in (self.prefill, self.decode)):
                await self.prefill.check()
                await self.decode.check()
                await asyncio.sleep(0.01)
        await self.prefill.check()
        await self.decode.check()


def _request(ids: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
    return Request(RequestId("r"), ids, params)


@pytest.fixture(scope="module")
def security() -> PeerSecurity:
    return PeerSecurity(new_cluster_token(), Authority().identity())


@pytest.fixture(params=["grpc", "shm", "distributed"])
async def pair(
    loaded: LoadedModel, checkpoint: Path, security: PeerSecurity, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    engine = EngineConfig(model=str(checkpoint), num_kv_blocks=48, threads=1)
    clock = MonotonicClock()
    way = WAYS[request.param]
    lending, runner = BridgeConfig(**way), ModelRunner(loaded, engine)
    connect = connect_as_configured(lending, security, runner.pair_groups("127.0.0.1"))
    decode = DecodeWorker(
        runner,
        DecodeConfig(lending=lending),
        WorkerRef(WorkerId("d"), Role.DECODE, new_epoch(), ""),
        clock,
        connect=connect,
    )
    prefill = PrefillWorker(
        ModelRunner(loaded, engine),
        PrefillConfig(borrowing=ReceiverConfig(distributed=way["distributed"])),
        WorkerRef(WorkerId("p"), Role.PREFILL, new_epoch(), ""),
        clock,
        connect,
    )
    await decode.start()
    await prefill.start()
    servers = []
    for worker, (server, port) in (
        (decode, await serve_decode(decode, "127.0.0.1", security)),
        (prefill, await serve_prefill(prefill, "127.0.0.1", security)),
    ):
        worker.ref = replace(worker.ref, address=f"127.0.0.1:{port}")
        servers.append(server)
    lender = GrpcWorker(decode.ref, security)
    yield Pair(prefill, decode, lender, request.param)
    await lender.close()
    await prefill.stop()
    await decode.stop()
    for server in servers:
        await server.stop(1.0)
    for worker in (prefill, decode):
        worker._runner.cache.allocator.check([])


async def test_a_second_turn_is_read_from_what_decode_has_made_of_the_first(
    pair: Pair, checkpoint: Path
) -> None:
    first = prompt_ids(50)
    turn = (*first, *await pair.answer(first), *prompt_ids(20, 3))
    num_made = (len(first) + MAX_TOKENS - 1) // BLOCK  # the last token's KV was not made
    result = await pair.lender.lend(pair.job(turn))
    assert result == LendResult(num_made * BLOCK, num_made)
    assert pair.num_received_bytes() == num_made * pair.prefill._runner.layout.block_bytes
    token, num_cached = await pair.first_token(turn)
    assert num_cached == num_made * BLOCK
    assert [token] == oracle_greedy(checkpoint, turn, 1)
    await pair.settle()


async def test_what_the_borrower_has_already_does_not_travel(pair: Pair) -> None:
    first = prompt_ids(80)
    await pair.answer(first)
    await pair.first_token(first[:49])  # three blocks are read there by itself
    assert await pair.lender.lend(pair.job(first)) == LendResult(80, 2)
    before = pair.num_received_bytes()
    assert await pair.lender.lend(pair.job(first)) == LendResult(80, 0)
    assert pair.num_received_bytes() == before
    await pair.settle()


async def test_what_is_not_cached_is_not_lent(pair: Pair) -> None:
    await pair.answer(prompt_ids(80))
    assert await pair.lender.lend(pair.job(prompt_ids(80, 5))) == LendResult(0, 0)
    assert await pair.lender.lend(pair.job(prompt_ids(10))) == LendResult(0, 0)


async def test_a_borrower_without_room_refuses_and_nothing_stays_held(pair: Pair) -> None:
    first = prompt_ids(300)
    await pair.answer(first)
    allocator = pair.prefill._runner.cache.allocator
    taken = await pair.prefill._thread.call(lambda: allocator.try_allocate(40))
    assert taken is not None
    with pytest.raises(ReservationRefused):
        await pair.lender.lend(pair.job(first))
    await pair.prefill._thread.call(lambda: allocator.release(taken))
    await pair.settle()


async def test_a_borrower_that_has_started_anew_is_not_written_to(pair: Pair) -> None:
    first = prompt_ids(80)
    await pair.answer(first)
    job = pair.job(first)
    with pytest.raises(StaleEpoch):
        await pair.lender.lend(replace(job, to=replace(job.to, epoch=new_epoch())))
    await pair.settle()


@pytest.mark.parametrize("by", ["call", "deadline", "borrower's ticket"])
async def test_a_loan_that_is_not_wanted_any_more_ends_on_both_sides(pair: Pair, by: str) -> None:
    first = prompt_ids(300)
    await pair.answer(first)
    gate, reached = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(reached.set)
        gate.wait(10)

    pair.prefill._thread.post(block)
    await reached.wait()
    job = pair.job(first, 0.3 if by == "deadline" else 30.0)
    lending = asyncio.create_task(pair.lender.lend(job))
    async with asyncio.timeout(5):
        while not pair.decode._runner.cache.allocator.num_held:  # noqa: ASYNC110 (a thread makes it so)
            await asyncio.sleep(0.005)
    if by == "call":
        lending.cancel()
        await asyncio.gather(lending, return_exceptions=True)
    elif by == "deadline":
        with pytest.raises(TransferTimeout):
            await lending
    else:
        await pair.prefill.cancel(CancelJob(job.request_id, job.ticket_id))
    async with asyncio.timeout(5):
        # the lender does not wait for a borrower that hangs
        while by != "borrower's ticket" and pair.decode._runner.cache.allocator.num_held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    gate.set()
    if by == "borrower's ticket":
        await asyncio.gather(lending, return_exceptions=True)
        assert lending.exception() is not None
    await pair.settle()
    assert await pair.lender.lend(pair.job(first)) == LendResult(288, 18)
    await pair.settle()
