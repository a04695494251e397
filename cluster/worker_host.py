"""One worker process: engine, worker, gRPC server and announcements, put together and taken down in order.

Knows no Ray: who hears the announcements is an argument. Built and stopped from any thread; the gRPC server
and the announcements run on the host's own IO thread, the engine on the worker's step thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from cluster.autoscaler.stats import Stats
from cluster.autoscaler.worker_reports import WorkerReports
from cluster.config import BatonConfig
from cluster.io_thread import IoThread
from cluster.workers import GrpcServer, build_worker, load_runner, serve_worker
from core.clock import MonotonicClock
from core.errors import WorkerError
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from core.peer_security import PeerSecurity
from core.worker_status import Announcement
from kv_transfer.cuda_ipc_transport import connect_on_device
from kv_transfer.device_choice import shared_device
from kv_transfer.shm_transport import connect_as_configured
from prefill_worker.worker import PrefillWorker

_SERVER_GRACE_S = 1.0
_MEET_PERIOD_S = 1.0


class Herald(Protocol):
    """Makes a worker known to the routers."""

    async def keep_announcing(self, announcement: Callable[[], Announcement]) -> None:
        """Announce until cancelled."""
        ...

    async def withdraw(self, announcement: Announcement) -> None: ...

    async def members(self) -> tuple[Announcement, ...] | None:
        """All workers that are known; None if nobody can say."""
        ...


class WorkerHost:
    """A running worker that listens on `host` (port of the system's choice) and announces itself."""

    def __init__(
        self,
        config: BatonConfig,
        role: Role,
        worker_id: WorkerId,
        host: str,
        herald: Herald,
        security: PeerSecurity,
        zone: str = "",
    ) -> None:
        """Loads the model and starts everything; the worker is known to the routers soon after. Takes
        seconds.
        """
        ref = WorkerRef(worker_id, role, new_epoch(), address="")  # not known before the server listens
        runner = load_runner(config, role)
        bridge = config.prefill.bridge if role is Role.PREFILL else config.decode.lending
        device = shared_device(runner.shared_pool, bridge.cuda_ipc) if role is Role.PREFILL else None
        between = connect_as_configured(bridge, security, runner.pair_groups(host))
        connect = connect_on_device(bridge, device, between)
        self._worker = build_worker(runner, config, ref, MonotonicClock(), connect)
        self._herald = herald
        self._security = security
        self._zone = zone
        self._announcing: asyncio.Task[None] | None = None
        self._reports = WorkerReports(self._worker)
        self._following: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._io = IoThread(f"io {worker_id}")
        try:
            self._server, self.ref = self._io.run(self._start(host, ref))
        except BaseException:
            self._io.close()
            raise

    async def _start(self, host: str, ref: WorkerRef) -> tuple[GrpcServer, WorkerRef]:
        await self._worker.start()
        server, port = await serve_worker(self._worker, host, self._security)
        self.ref = dataclasses.replace(ref, address=f"{host}:{port}")
        self._announcing = asyncio.create_task(self._herald.keep_announcing(self.announcement))
        self._following = asyncio.create_task(self._reports.follow())
        self._meeting = asyncio.create_task(self._meet())
        return server, self.ref

    def announcement(self) -> Announcement:
        return dataclasses.replace(self._worker.announcement(), ref=self.ref, zone=self._zone)

    def stats(self) -> Stats:
        """Its load, for the autoscaler."""
        return self._reports.stats()

    def check_health(self) -> None:
        """Raises WorkerError when the worker does not get on with its work."""
        if not self._worker.is_healthy():
            raise WorkerError(f"worker {self.ref.worker_id} makes no progress")

    async def _meet(self) -> None:
        """Keep a prefill worker ready for the decode workers that there are."""
        while True:
            worker = self._worker
            if isinstance(worker, PrefillWorker) and (members := await self._herald.members()) is not None:
                worker.expect([line.ref for line in members if line.ref.role is Role.DECODE])
            await asyncio.sleep(_MEET_PERIOD_S)

    async def stop(self, drain_timeout_s: float) -> None:
        """Leave the registry, let running streams end for `drain_timeout_s`, take everything down. From
        another loop.
        """
        await self._io.run_from_loop(self._stop(drain_timeout_s))
        self._io.close()

    async def _stop(self, drain_timeout_s: float) -> None:
        for task in filter(None, (self._announcing, self._following, self._meeting)):
            task.cancel()
        await self._herald.withdraw(self.announcement())
        await self._worker.drain(drain_timeout_s)
        await self._server.stop(_SERVER_GRACE_S)
        await self._worker.stop()
