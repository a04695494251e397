"""GlassSystem: workers and router of one process over real gRPC and HTTP, so that tests can look inside.

Owns the wiring and what can be seen: where a request is at this moment, who holds which block. Each worker
has its own IO and step thread, the router one of its own. Looks are made from the test's thread and take
nothing but copies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import uvicorn

from cluster.config import config_from_settings
from cluster.worker_host import WorkerHost
from core.ids import Role, WorkerId
from core.peer_security import PeerSecurity
from core.role_change import RoleOrder
from core.worker_status import Announcement
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from router.app import create_app
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker
from tests.e2e.client import Client
from tests.e2e.harness import free_port, is_ready
from tests.e2e.scrape import wait_until

_START_S = 60.0


class Moment(StrEnum):
    """Where a request is: waiting for the router or a worker, being read, between two workers, answered."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


class _Herald:
    """Nobody has to be told: the router asks the system itself."""

    async def keep_announcing(
        self, announcement: Callable[[], Announcement], follow: Callable[[RoleOrder], None]
    ) -> None:
        await asyncio.Event().wait()

    async def announce(self, announcement: Announcement) -> RoleOrder | None:
        return None

    async def withdraw(self, announcement: Announcement) -> None:
        del announcement

    async def members(self) -> tuple[Announcement, ...] | None:
        return None


async def _num_tasks() -> int:
    return len(asyncio.all_tasks())


class GlassSystem:
    """`num_prefill` and `num_decode` workers of `model`, and a router on `port`."""

    def __init__(
        self, model: Path, settings: dict[str, Any], num_prefill: int = 2, num_decode: int = 2
    ) -> None:
        engine = {**settings.get("engine", {}), "model": str(model)}
        config = config_from_settings({**settings, "engine": engine})
        security = PeerSecurity()
        names = [(Role.PREFILL, index) for index in range(num_prefill)]
        names += [(Role.DECODE, index) for index in range(num_decode)]
        self._hosts = [
            WorkerHost(config, role, WorkerId(f"{role.value}-{index}"), "127.0.0.1", _Herald(), security)
            for role, index in names
        ]
        self.app = create_app(
            config.router,
            ServedModel.load(model, config.router.model_name),
            self,
            lambda ref: GrpcWorker(ref, security),
        )
        self.port = free_port()
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="warning", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, name="router", daemon=True)
        self._thread.start()
        wait_until(lambda: "" if is_ready(self.port) else "the router is not ready", _START_S)
        self.client = Client(self.port)

    async def announcements(self) -> tuple[Announcement, ...]:
        self._router_loop = asyncio.get_running_loop()
        return tuple(host.announcement() for host in self._hosts)

    @property
    def workers(self) -> list[PrefillWorker | DecodeWorker]:
        return [host._worker.current for host in self._hosts]

    def moment(self, seed: int) -> Moment | None:
        """Where the request with that seed is; None if no worker has it: it has not come that far, or is
        over.
        """
        for worker in self.workers:
            if isinstance(worker, PrefillWorker):
                for call in worker._calls:
                    if call.prompt.job.request.sampling.seed == seed and not call.has_ended:
                        if call.prompt.started_at is None:
                            return Moment.QUEUED
                        return Moment.PREFILLING if call._result is None else Moment.TRANSFERRING
            else:
                for generation in worker._loop._generations:
                    if generation.job.request.sampling.seed == seed:
                        if generation.waiting_since is not None:
                            return Moment.TRANSFERRING
                        return Moment.DECODING if generation.is_begun else Moment.QUEUED
        return None

    def blocks(self) -> dict[str, tuple[int, int, int]]:
        """Worker → blocks in all, free, cached."""
        found = {}
        for worker in self.workers:
            allocator = worker._runner.cache.allocator
            found[worker.ref.worker_id] = (allocator.num_blocks, allocator.num_free, allocator.num_cached)
        return found

    def left_inside(self) -> dict[str, float]:
        """What of requests is still in router or workers, besides blocks: empty at rest."""
        stats = self.app.state.metrics.work.stats()
        counts = {f"router {name}": stats[name] for name in ("open", "waiting", "waiting_tokens")}
        for worker in self.workers:
            name = worker.ref.worker_id
            if isinstance(worker, PrefillWorker):
                counts[f"{name} calls"] = worker.num_calls
                counts[f"{name} transfers"] = len(worker._sender._sessions)
                counts[f"{name} tickets"] = len(worker._loop._tickets)
            else:
                counts[f"{name} jobs and tickets"] = worker._loop.num_unfinished
                counts[f"{name} streams"] = worker._streams.num_running
        return {name: count for name, count in counts.items() if count}

    def num_tasks(self) -> int:
        """Coroutines under way on all loops: those that serve for ever, and those of requests."""
        loops = [host._io._loop for host in self._hosts] + [self._router_loop]
        return sum(asyncio.run_coroutine_threadsafe(_num_tasks(), loop).result() for loop in loops)

    def check(self) -> None:
        """Assert that each block's holders are those that list it."""
        for host, worker in zip(self._hosts, self.workers, strict=True):
            host._io.run(worker.check())

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20.0)
        for host in self._hosts:
            asyncio.run(host.stop(1.0))
        assert not self._thread.is_alive(), "the router did not stop"

    def __enter__(self) -> GlassSystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
