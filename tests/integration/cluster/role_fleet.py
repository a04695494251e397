"""A router and workers of either role in one process, joined by real gRPC; workers can be lost and told to
change.

Owns their wiring and what a client would see; the promises are the tests'.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import BatonConfig
from cluster.local_registry import LocalRegistry
from cluster.role_worker import RoleWorker, Surroundings
from core.clock import Deadline, MonotonicClock
from core.errors import ServingError
from core.ids import RequestId, Role, WorkerId, WorkerRef, new_epoch
from core.jobs import GenerateEvent
from core.peer_security import PeerSecurity, new_cluster_token
from core.request import Request, SamplingParams
from core.role_change import RoleChange, RoleOrder
from decode_worker.service import serve_either
from engine.loaded_model import LoadedModel
from engine.runner import ModelRunner
from kv_transfer.grpc_transport import GrpcTransport
from router.decision import Decision
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.role_watch import RoleWatch
from router.worker_clients import GrpcWorker
from router.worker_table import WorkerTable
from tests.step_gate import StepGate

MAX_TOKENS = 40


def settings(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    return {
        "engine": {"model": str(checkpoint), "num_kv_blocks": 96, "threads": 1, "overlap": "off"},
        "router": {"plan": "remote", "membership_poll_s": 0.1, "reconnect_s": 0.1},
        "cluster": {"roles": {"settle_s": 0.5, "drain_s": 0.2, **changes}},
    }


@dataclass
class Reader:
    """One stream as its client reads it; `has_tokens(n)` is set when so many are there."""

    tokens: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    num_losses: int = 0
    _marks: dict[int, asyncio.Event] = field(default_factory=dict)

    def read(self, event: GenerateEvent) -> bool:
        assert event.delta.position == len(self.tokens), "a token is missing or came twice"
        self.tokens += event.delta.token_ids
        self.cached.append(event.delta.num_cached_tokens)
        for count, mark in self._marks.items():
            if len(self.tokens) >= count:
                mark.set()
        return False

    def placed(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def lost(self, samples: Sequence[int]) -> None:
        self.num_losses += 1

    def pulled(self) -> None:
        """How cached blocks came is not of interest here."""

    async def has_tokens(self, count: int) -> None:
        mark = self._marks.setdefault(count, asyncio.Event())
        if len(self.tokens) >= count:
            mark.set()
        async with asyncio.timeout(20):
            await mark.wait()


@dataclass
class Site:
    worker: RoleWorker
    server: Any
    runner: ModelRunner
    gate: StepGate


class Desk(LocalRegistry):
    """Decides like the registry, and tells workers over gRPC as a router does."""

    def __init__(
        self, config: BatonConfig, sites: dict[WorkerId, RoleWorker], security: PeerSecurity
    ) -> None:
        super().__init__(config.cluster.roles, MonotonicClock(), sites)
        self._security = security
        self.changes: list[tuple[RoleOrder, RoleChange]] = []

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        caller = GrpcWorker(order.worker, self._security)
        try:
            change = await caller.change_role(order)
        finally:
            await caller.close()
        self.changes.append((order, change))
        return change


class RoleFleet:
    """`start` adds workers; `open` begins a stream; `stop` at the end."""

    def __init__(self, loaded: LoadedModel, config: BatonConfig) -> None:
        self._loaded = loaded
        self.config = config
        self.security = PeerSecurity(new_cluster_token())
        self.sites: dict[str, Site] = {}
        self._known: dict[WorkerId, RoleWorker] = {}
        self.desk = Desk(config, self._known, self.security)
        self._clock = MonotonicClock()
        self.table = WorkerTable(
            config.router, self.desk, lambda ref: GrpcWorker(ref, self.security), self._clock
        )
        self.metrics = RouterMetrics()
        self.pipeline = Pipeline(config.router, self.table, self.metrics, self._clock, random.Random(1))
        self.watch = RoleWatch(self.table, self.desk, self._clock, asyncio.sleep)
        self._watching: asyncio.Task[None] | None = None
        self._num_requests = 0

    async def start(self, name: str, role: Role) -> Site:
        engine = self.config.engine_of(role)
        runner = ModelRunner(self._loaded, engine)
        ref = WorkerRef(WorkerId(name), role, new_epoch(), "")

        async def announce(worker: RoleWorker) -> None:
            await self.desk.announcements()

        surroundings = Surroundings(
            connect=lambda wanted: lambda peer: GrpcTransport(peer, self.security), changed=announce
        )
        worker = RoleWorker(
            runner,
            self.config,
            ref,
            self._clock,
            surroundings,
        )
        await worker.start()
        server, port = await serve_either(worker, "127.0.0.1", self.security)
        worker.listens_at(f"127.0.0.1:{port}")
        self._known[ref.worker_id] = worker
        site = self.sites[name] = Site(worker, server, runner, StepGate(runner))
        if self._watching is None:
            await self.table.start()
            self._watching = asyncio.create_task(self.watch.run())
        return site

    async def lose(self, name: str) -> None:
        """As if its process were killed: its connections break, and nobody hears of it again."""
        site = self.sites.pop(name)
        del self._known[site.worker.ref.worker_id]
        site.gate.release()
        await site.server.stop(None)
        await site.worker.stop()

    def open(self, ids: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> tuple[Reader, asyncio.Task[None]]:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        request = Request(RequestId(f"r{self._num_requests}"), ids, sampling)
        reader = Reader()
        deadline = Deadline.after(30.0, self._clock)
        return reader, asyncio.create_task(self.pipeline.serve(request, reader, deadline))

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Poll for what comes and stays."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def usable(self, role: Role) -> set[str]:
        return {entry.ref.worker_id for entry in self.table.usable(role)}

    async def at_rest(self) -> None:
        """No worker holds a block, and each counts none that it does not hold."""
        for site in self.sites.values():
            await self.until(lambda site=site: site.runner.cache.allocator.num_held == 0)  # type: ignore[misc]
            await site.worker.check()

    async def stop(self) -> None:
        for site in self.sites.values():
            site.gate.release()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            await self.pipeline.stop()
            await self.table.stop()
        for name in list(self.sites):
            runner = self.sites[name].runner
            await self.lose(name)
            runner.cache.allocator.check([])


async def refusal(call: Awaitable[object]) -> ServingError:
    """The error that `call` ends with."""
    try:
        await call
    except ServingError as error:
        return error
    raise AssertionError("it was not refused")
