"""One worker process: engine, worker, gRPC server and announcements, put together and taken down in order.

Knows no Ray: who hears the announcements is an argument. Built and stopped from any thread; the gRPC server
and the announcements run on the host's own IO thread, the engine on the worker's step thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cluster.autoscaler.stats import Stats
from cluster.autoscaler.worker_reports import WorkerReports
from cluster.awake_watch import AwakeWatch
from cluster.config import BatonConfig
from cluster.drain_table import DrainOrder
from cluster.io_thread import IoThread
from cluster.role_worker import RoleWorker, Surroundings
from cluster.workers import AnyWorker, load_runner
from core.clock import MonotonicClock
from core.errors import WorkerError
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from core.peer_security import PeerSecurity
from core.role_change import RoleOrder
from core.worker_status import Announcement
from decode_worker.service import serve_either
from kv_transfer.cuda_ipc_transport import connect_on_device
from kv_transfer.device_choice import shared_device
from kv_transfer.shm_transport import connect_as_configured
from kv_transfer.transport import Connect
from prefill_worker.worker import PrefillWorker
from protos.service import address_of

_SERVER_GRACE_S = 1.0
_MEET_PERIOD_S = 1.0

_log = logging.getLogger(__name__)


class GrpcServer(Protocol):
    async def stop(self, grace: float | None) -> None: ...


class Herald(Protocol):
    """Makes a worker known to the routers."""

    async def keep_announcing(
        self, announcement: Callable[[], Announcement], follow: Callable[[RoleOrder | DrainOrder], None]
    ) -> None:
        """Announce until cancelled. `follow` hears what the worker is to do."""
        ...

    async def announce(self, announcement: Announcement) -> RoleOrder | DrainOrder | None:
        """Once more, now. Raises ConnectionError."""
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

        def connect(wanted: Role) -> Connect:
            bridge = config.prefill.bridge if wanted is Role.PREFILL else config.decode.lending
            device = shared_device(runner.shared_pool, bridge.cuda_ipc) if wanted is Role.PREFILL else None
            return connect_on_device(
                bridge, device, connect_as_configured(bridge, security, runner.pair_groups(host))
            )

        def offer(worker: AnyWorker) -> None:
            worker.offer_shared_memory()
            worker.offer_groups(host, security)

        clock = MonotonicClock()
        self._watch = AwakeWatch(clock)
        surroundings = Surroundings(connect, offer, self._changed, awake=self._watch.awake)
        self._worker = RoleWorker(runner, config, ref, clock, surroundings)
        self._herald = herald
        self._security = security
        self._zone = zone
        self._announcing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._reports = WorkerReports(self._worker)
        self._following: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._taking_down: asyncio.Task[None] | None = None
        self._is_retired = False
        self._watch.start()
        self._io = IoThread(f"io {worker_id}")
        try:
            self._server = self._io.run(self._start(host))
        except BaseException:
            self._io.close()
            self._watch.close()
            raise

    async def _start(self, host: str) -> GrpcServer:
        await self._worker.start()
        server, port = await serve_either(self._worker, host, self._security)
        self._worker.listens_at(address_of(host, port))
        self._announcing = asyncio.create_task(self._herald.keep_announcing(self.announcement, self._follow))
        self._following = asyncio.create_task(self._reports.follow())
        self._meeting = asyncio.create_task(self._meet())
        for task in (self._announcing, self._following, self._meeting):
            task.add_done_callback(self._spawned)  # none of them ends by itself
        return server

    def announcement(self) -> Announcement:
        return dataclasses.replace(self._worker.announcement(), zone=self._zone)

    @property
    def ref(self) -> WorkerRef:
        return self._worker.ref

    def _follow(self, order: RoleOrder | DrainOrder) -> None:
        """What the registry wants; it says so again until it is done."""
        if isinstance(order, RoleOrder):
            self._spawn(self._worker.change_role(order))
            return
        within_s = self._drain_timeout_s if order.within_s is None else order.within_s
        _log.info("%s drains within %.0f s, then another one takes its place", order.worker_id, within_s)
        self._is_retired = True
        self._spawn(self._stop(within_s))

    async def _changed(self, worker: RoleWorker) -> None:
        """The routers are to know at once."""
        try:
            await self._herald.announce(self.announcement())
        except ConnectionError as error:
            _log.warning("the new role is announced later: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s: %s: %s", self.ref.worker_id, type(error).__name__, error)

    def stats(self) -> Stats:
        """Its load, for the autoscaler."""
        return self._reports.stats()

    def check_health(self) -> None:
        """Raises WorkerError when the worker does not get on with its work, or nobody will hear of it, and
        once it is drained: so Serve starts another one.
        """
        if self._is_retired and self._taking_down is not None:
            raise WorkerError(f"worker {self.ref.worker_id} was drained and is to be replaced")
        if self._announcing is not None and self._announcing.done() and not self._announcing.cancelled():
            raise WorkerError(f"worker {self.ref.worker_id} does not announce itself any more")
        if not self._worker.is_healthy():
            raise WorkerError(f"worker {self.ref.worker_id} makes no progress")

    async def _meet(self) -> None:
        """Keep a prefill worker ready for the decode workers that there are."""
        while True:
            worker = self._worker.current
            if isinstance(worker, PrefillWorker) and (members := await self._herald.members()) is not None:
                worker.expect([line.ref for line in members if line.ref.role is Role.DECODE])
            await asyncio.sleep(_MEET_PERIOD_S)

    async def stop(self, drain_timeout_s: float) -> None:
        """Leave the registry, let running streams end for `drain_timeout_s`, take everything down. From
        another loop.
        """
        await self._io.run_from_loop(self._stop(drain_timeout_s))
        self._io.close()
        self._watch.close()

    async def _stop(self, drain_timeout_s: float) -> None:
        """A second call may shorten the drain, and waits for the first to take the worker down."""
        for task in filter(None, (self._announcing, self._meeting)):
            task.cancel()
        await self._herald.withdraw(self.announcement())
        if self._taking_down is None:
            await self._worker.drain(drain_timeout_s)
        if self._taking_down is None:
            self._taking_down = asyncio.create_task(self._take_down(), name="take down")
        await asyncio.shield(self._taking_down)

    async def _take_down(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(_SERVER_GRACE_S)
        await self._worker.stop()
