"""RoleWorker: engine + a role. One loop at a time runs on the engine, and it can be another one tomorrow.

Owns the change: the old role drains and gives all blocks back, then the new one starts on the same model and
pool, whose cached blocks stay. It is fenced like a new process: it has an epoch of its own, since tickets,
tombstones and streams of the old role ended with it. What watchers know of the blocks goes on. Who changes
when is decided elsewhere. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from cluster.config import BatonConfig
from cluster.role_series import RoleSeries
from cluster.workers import AnyWorker, Lasting, build_worker, share_pool
from core.awake import Awake
from core.clock import Clock
from core.errors import StaleEpoch, WorkerDraining, WorkerError
from core.ids import Role, WorkerRef, new_epoch
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SnapshotJob,
    WatchEvent,
)
from core.role_change import RoleCause, RoleChange, RoleOrder
from core.worker_status import Announcement
from engine.runner import ModelRunner
from engine.step_thread import NewSteps, StepThread
from kv_transfer.feed import Feed
from kv_transfer.receiver import Receiver
from kv_transfer.transport import Connect

_LONGEST_CHANGE_S = 30.0
_LATE_S = 10.0  # how much longer than it may a drain takes, unless a step hangs

_log = logging.getLogger(__name__)


async def _nothing(worker: RoleWorker) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker has around it. `connect` gives the way to other workers that a role needs; `offer` lets
    them use faster ones to a worker that is about to start; `changed` is awaited when a new role is served,
    before whoever ordered it hears of it. `new_steps` makes the step threads. `awake` knows when the process
    was stopped (None: never).
    """

    connect: Callable[[Role], Connect]
    offer: Callable[[AnyWorker], None] = lambda worker: None
    changed: Callable[[RoleWorker], Awaitable[None]] = _nothing
    new_steps: NewSteps = StepThread
    awake: Awake | None = None


class RoleWorker:
    """The surface of a worker, answered by the loop of the moment. `start` comes first, `stop` last."""

    def __init__(
        self,
        runner: ModelRunner,
        config: BatonConfig,
        ref: WorkerRef,
        clock: Clock,
        surroundings: Surroundings,
    ) -> None:
        self._runner = runner
        self._config = config
        self._clock = clock
        self._surroundings = surroundings
        self._home = ref
        self._address = ref.address
        self._cause: RoleCause | None = None
        self._series = RoleSeries(config)
        self._awake = surroundings.awake or Awake(clock)
        self._lasting = Lasting(Feed(ref.epoch), self._series, self._awake, surroundings.new_steps)
        share_pool(runner, config)
        self._current = self._build(ref)
        self._series.begins(ref.role)
        self._changing: asyncio.Task[RoleChange] | None = None
        self._began_at = 0.0
        self._next_role = ref.role
        self._is_stopping = False
        self._is_broken = False
        self._ending: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Begin to serve, on the running loop."""
        self._surroundings.offer(self._current)
        await self._current.start()

    def listens_at(self, address: str) -> None:
        """Where it is reached; known once its server listens."""
        self._address = address

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, change no role, finish what runs."""
        self._is_stopping = True
        if self._changing is not None:
            with contextlib.suppress(TimeoutError):
                async with self._awake.timeout(_LONGEST_CHANGE_S):
                    await asyncio.wait((self._changing,))
        try:
            async with self._awake.timeout(timeout_s + _LATE_S):
                await self._current.drain(timeout_s)
        except TimeoutError:
            _log.error("%s did not drain: its step does not end", self.ref.worker_id)

    async def stop(self) -> None:
        """End everything. Safe to call twice."""
        self._is_stopping = True
        await self._current.stop()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def is_healthy(self) -> bool:
        """The loop gets on with its work, or is just being replaced."""
        if self._is_broken:
            return False
        if self._changing is not None and not self._changing.done():
            longest_s = self._config.cluster.roles.drain_s + _LONGEST_CHANGE_S
            return self._awake.elapsed_s(self._began_at) < longest_s
        return self._current.is_healthy()

    # ------------------------------------------------------------ the change

    async def change_role(self, order: RoleOrder) -> RoleChange:
        """Take the role that is ordered; returns when it is served. Repeated while that goes on, it waits
        for the same change.

        Raises StaleEpoch if another incarnation is meant, which may be the one before the change,
        WorkerDraining if the worker stops or is on its way to the other role, WorkerError if the old role
        cannot be left.
        """
        if self._changing is not None and not self._changing.done():
            if order.role is not self._next_role:
                raise WorkerDraining("the worker is leaving that role", worker_id=self.ref.worker_id)
            return await asyncio.shield(self._changing)
        if order.worker.epoch != self._current.ref.epoch:
            raise StaleEpoch("the order is for another incarnation", worker_id=self.ref.worker_id)
        if self._is_stopping or self._is_broken:
            raise WorkerDraining("the worker stops", worker_id=self.ref.worker_id)
        if order.role is self._current.ref.role:
            return RoleChange(self.ref, 0.0, 0.0)
        self._began_at, self._next_role = self._clock.now(), order.role
        self._changing = asyncio.create_task(self._change(order), name=f"role {order.role}")
        return await asyncio.shield(self._changing)

    async def _change(self, order: RoleOrder) -> RoleChange:
        roles = self._config.cluster.roles
        old = self._current
        ref = dataclasses.replace(self.ref, role=order.role, epoch=new_epoch())
        new = self._build(ref)
        try:
            self._surroundings.offer(new)  # what cannot be had here fails while the old role still runs
            is_urgent = order.cause is RoleCause.EMPTY_POOL
            _log.info("%s takes the role %s: %s", ref.worker_id, order.role, order.cause)
            began_at = self._clock.now()
            is_left = await old.leave(roles.urgent_drain_s if is_urgent else roles.drain_s)
            left_at = self._clock.now()
            if not is_left:
                self._is_broken = True
                raise WorkerError("the worker cannot leave its role", worker_id=ref.worker_id)
        except BaseException:
            # it may be tried each second: what was offered in vain must not pile up
            await new.receiver.close()
            raise
        if num_held := self._runner.cache.allocator.num_held:
            _log.error("%d blocks are held by nobody after %s left its role", num_held, ref.worker_id)
        self._series.rests(old.ref.role)
        self._end_later(old)
        await new.start()
        self._current, self._cause = new, order.cause
        self._series.begins(order.role)
        change = RoleChange(ref, left_at - began_at, self._clock.now() - left_at)
        self._series.observe(order, change)
        _log.info("%s has it after %.0f + %.0f ms", ref.worker_id, change.drain_s * 1e3, change.start_s * 1e3)
        await self._surroundings.changed(self)
        return change

    def _build(self, ref: WorkerRef) -> AnyWorker:
        """A worker around the engine; nothing of it runs yet."""
        return build_worker(
            self._runner, self._config, ref, self._clock, self._surroundings.connect(ref.role), self._lasting
        )

    def _end_later(self, old: AnyWorker) -> None:
        """Its peers are told, its connections closed, while the new role runs."""
        ending = asyncio.create_task(old.stop(), name=f"end of {old.ref.worker_id} as {old.ref.role}")
        self._ending.add(ending)
        ending.add_done_callback(self._ended)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            _log.error("an old role did not end as it should", exc_info=error)

    # ------------------------------------------------------------ the surface

    @property
    def ref(self) -> WorkerRef:
        return dataclasses.replace(self._current.ref, address=self._address)

    @property
    def current(self) -> AnyWorker:
        """The incarnation of the moment."""
        return self._current

    @property
    def receiver(self) -> Receiver:
        """The bridge's end of the role of the moment."""
        return self._current.receiver

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        return await self._current.prefill(job)

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        return self._current.generate(job)

    async def lend(self, job: LendJob) -> LendResult:
        return await self._current.lend(job)

    async def cancel(self, job: CancelJob) -> None:
        await self._current.cancel(job)

    def watch(self) -> AsyncIterator[WatchEvent]:
        return self._current.watch()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        return await self._current.snapshot(job)

    async def metrics(self) -> bytes:
        return await asyncio.to_thread(self._series.text)

    def announcement(self) -> Announcement:
        home = self._config.prefill if self._home.role is Role.PREFILL else self._config.decode
        return dataclasses.replace(
            self._current.announcement(),
            ref=self.ref,
            home_pool=home.home_pool,
            home_role=self._home.role,
            cause=self._cause,
            process_epoch=self._home.epoch,
        )

    async def check(self) -> None:
        """Assert that each block's holders are those that list it."""
        await self._current.check()
