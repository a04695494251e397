"""A router's pipeline, a prefill and a decode worker over real gRPC on one loop, the workers' steps at gates.

Owns the wiring, and how to bring a request to each moment of its way and keep it there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from core.clock import Deadline, MonotonicClock
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch
from core.jobs import GenerateEvent
from core.peer_security import PeerSecurity
from core.request import Request, SamplingParams
from core.worker_status import Announcement
from decode_worker.config import DecodeConfig
from decode_worker.service import serve as serve_decode
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel
from engine.runner import ModelRunner
from kv_transfer.config import BridgeConfig, SharedMemory
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.transport import CommitClaim, CommitReceipt, Fence
from prefill_worker.config import PrefillConfig
from prefill_worker.service import serve as serve_prefill
from prefill_worker.worker import PrefillWorker
from router.config import PlanSetting, RouterConfig
from router.decision import Decision
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.worker_clients import GrpcWorker
from router.worker_table import WorkerTable
from tests.step_gate import StepGate

MAX_TOKENS = 40
_LONG = 200
_PATIENCE_S = 10.0


class Moment(StrEnum):
    QUEUED_AT_PREFILL = "queued at prefill"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    QUEUED_AT_DECODE = "queued at decode"
    DECODING = "decoding"


class _GatedTransport(GrpcTransport):
    """Commits wait at a gate."""

    def __init__(self, ref: WorkerRef, gate: asyncio.Event) -> None:
        super().__init__(ref)
        self._gate = gate

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        await self._gate.wait()
        return await super().commit(fence, claim)


@dataclass
class Answer:
    """A Reader that keeps the tokens."""

    tokens: list[int] = field(default_factory=list)

    def placed(self, decision: Decision) -> None:
        """Where it goes is said by the plan."""

    def pulled(self) -> None:
        """Nothing is cached anywhere."""

    def lost(self, samples: Sequence[int]) -> None:
        """It goes on."""

    def read(self, event: GenerateEvent) -> bool:
        self.tokens += event.delta.token_ids
        return False


@dataclass
class PairSite:
    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_gate: StepGate
    decode_gate: StepGate
    commits: asyncio.Event
    pipeline: Pipeline
    servers: list[Any]

    async def announcements(self) -> tuple[Announcement, ...]:
        return tuple(replace(worker.announcement(), ref=worker.ref) for worker in (self.prefill, self.decode))

    def begin(
        self, name: str, ids: tuple[int, ...], max_tokens: int = MAX_TOKENS, timeout_s: float = 60.0
    ) -> tuple[asyncio.Task[None], Answer]:
        params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        answer, clock = Answer(), self.pipeline.clock
        serving = self.pipeline.serve(
            Request(RequestId(name), ids, params), answer, Deadline.after(timeout_s, clock)
        )
        return asyncio.create_task(serving), answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll for what other threads bring about; what would pass by is held at a gate."""
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():  # noqa: ASYNC110 (another thread raises no event of this loop)
                await asyncio.sleep(0.005)

    def num_held(self, role: Role) -> int:
        worker = self.prefill if role is Role.PREFILL else self.decode
        held: int = worker._runner.cache.allocator.num_held
        return held

    async def bring_to(self, moment: Moment, ids: tuple[int, ...], timeout_s: float) -> asyncio.Task[None]:
        """A request that stands at `moment`, and others in its way where it is to wait."""
        match moment:
            case Moment.QUEUED_AT_PREFILL:
                self.prefill_gate.hold(after=1)
                self.begin("other", tuple(reversed(ids)), max_tokens=2)
                await self.prefill_gate.reached()
                task, _ = self.begin("r", ids, timeout_s=timeout_s)
                await self.until(lambda: self.prefill.num_calls == 2)
            case Moment.PREFILLING:
                self.prefill_gate.hold(after=3)
                task, _ = self.begin("r", ids, timeout_s=timeout_s)
                await self.prefill_gate.reached()
                await self.until(lambda: self.num_held(Role.DECODE) > 0)
            case Moment.TRANSFERRING:
                self.commits.clear()
                task, answer = self.begin("r", ids, timeout_s=timeout_s)
                await self.until(lambda: len(answer.tokens) == 1 and len(self.decode._loop._claims) == 1)
                assert self.num_held(Role.PREFILL) > 0
            case Moment.QUEUED_AT_DECODE:
                self.decode_gate.hold(after=3)
                self.begin("other", ids[:20], max_tokens=MAX_TOKENS)
                await self.decode_gate.reached()
                task, _ = self.begin("r", ids, timeout_s=timeout_s)
                await self.until(lambda: self.decode._streams.num_running == 2)
                await self.decode_gate.step()
                assert self.decode._loop._scheduler.num_waiting == 1
            case Moment.DECODING:
                self.decode_gate.hold(after=5)
                task, answer = self.begin("r", ids, timeout_s=timeout_s)
                await self.decode_gate.reached()
                await self.until(lambda: len(answer.tokens) > 2)
        return task

    async def settle(self) -> None:
        """Until nothing is held anywhere."""
        self.prefill_gate.release()
        self.decode_gate.release()
        self.commits.set()
        await self.until(lambda: self.num_held(Role.PREFILL) == self.num_held(Role.DECODE) == 0)
        await self.until(lambda: self.prefill.num_calls == 0)
        await self.prefill.check()
        await self.decode.check()


def prompt_ids(num_tokens: int = _LONG) -> tuple[int, ...]:
    return tuple((5 * i * i + 7 * i + 3) % 512 for i in range(num_tokens))


@asynccontextmanager
async def pair_site(loaded: LoadedModel, checkpoint: Path, plan: PlanSetting) -> AsyncIterator[PairSite]:
    """Both workers take one prompt at a time; reading one takes many steps."""
    torch.set_num_threads(1)
    clock, commits = MonotonicClock(), asyncio.Event()
    commits.set()
    engine = EngineConfig(model=str(checkpoint), num_kv_blocks=64, threads=1)
    bridge = BridgeConfig(shm=SharedMemory.NEVER)
    prefill = PrefillWorker(
        ModelRunner(loaded, engine),
        PrefillConfig(token_budget=16, max_num_seqs=1, bridge=bridge),
        WorkerRef(WorkerId("p"), Role.PREFILL, new_epoch(), ""),
        clock,
        lambda ref: _GatedTransport(ref, commits),
    )
    decode = DecodeWorker(
        ModelRunner(loaded, engine),
        DecodeConfig(max_num_seqs=1),
        WorkerRef(WorkerId("d"), Role.DECODE, new_epoch(), ""),
        clock,
    )
    await prefill.start()
    await decode.start()
    config = RouterConfig(plan=plan, pull_timeout_s=0.0, max_hold_s=0.0)
    security = PeerSecurity()
    site: PairSite
    servers = [await serve_prefill(prefill, "127.0.0.1", security)]
    servers.append(await serve_decode(decode, "127.0.0.1", security))
    for worker, (_, port) in zip((prefill, decode), servers, strict=True):
        worker.ref = replace(worker.ref, address=f"127.0.0.1:{port}")

    class Membership:
        async def announcements(self) -> tuple[Announcement, ...]:
            return await site.announcements()

    table = WorkerTable(config, Membership(), lambda ref: GrpcWorker(ref, security), clock)
    site = PairSite(
        prefill,
        decode,
        StepGate(prefill._runner),
        StepGate(decode._runner),
        commits,
        Pipeline(config, table, RouterMetrics(), clock, random.Random(1)),
        [server for server, _ in servers],
    )
    await table.start()
    await site.until(lambda: all(table.usable(role) for role in (Role.PREFILL, Role.DECODE)))
    try:
        yield site
    finally:
        site.prefill_gate.release()
        site.decode_gate.release()
        commits.set()
        await site.pipeline.stop()
        await table.stop()
        await prefill.stop()
        await decode.stop()
        for server in site.servers:
            await server.stop(1.0)
        for worker in (prefill, decode):
            worker._runner.cache.allocator.check([])
