"""LocalSystem: the whole service in one process, without Ray and without sockets between router and workers.

Owns the in-process counterparts of registry, gRPC and Serve. The workers of both roles share the weights if
they serve the same model. Router and workers live on one asyncio loop, each worker's steps on a thread of its
own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.awake_watch import AwakeWatch
from cluster.config import BatonConfig
from cluster.local_registry import LocalRegistry
from cluster.role_worker import RoleWorker, Surroundings
from cluster.workers import step_limits
from core.clock import MonotonicClock
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from engine.loaded_model import LoadedModel, load_model
from engine.runner import ModelRunner, use_threads
from kv_transfer.loopback import SCHEME, LoopbackDirectory
from router.app import create_app
from router.served_model import ServedModel
from router.workers import InProcessWorker


class LocalWorker(InProcessWorker):
    """One incarnation of a worker, which ends with its role; the metrics are those of all of them."""

    def __init__(self, worker: RoleWorker) -> None:
        super().__init__(worker.current)
        self._worker = worker

    async def metrics(self) -> bytes:
        return await self._worker.metrics()


class LocalSystem:
    """Workers and router of one process. `start` before `app` serves, `stop` after it."""

    def __init__(self, config: BatonConfig) -> None:
        """Loads and warms up the engines. Takes seconds."""
        self._config = config
        self._directory = LoopbackDirectory()
        self._clock = MonotonicClock()
        self._watch = AwakeWatch(self._clock)
        loaded: dict[str, LoadedModel] = {}
        self._workers = [
            self._build(role, index, loaded)
            for role, count in (
                (Role.PREFILL, config.cluster.num_prefill_workers),
                (Role.DECODE, config.cluster.num_decode_workers),
            )
            for index in range(count)
        ]
        by_id = {worker.ref.worker_id: worker for worker in self._workers}
        self._registry = LocalRegistry(config.cluster.roles, self._clock, by_id)
        self.app: Any = create_app(
            config.router,
            ServedModel.load(Path(config.decode_engine.model), config.router.model_name),
            self._registry,
            lambda ref: LocalWorker(by_id[ref.worker_id]),
            roles=self._registry,
        )

    async def start(self) -> None:
        """Start the workers, on the running loop."""
        self._watch.start()
        for worker in self._workers:
            await worker.start()

    async def stop(self) -> None:
        """Let what runs end for `drain_timeout_s`, then take the workers down; prefill first, it feeds the
        others.
        """
        self._registry.end()
        for worker in self._workers:
            await worker.drain(self._config.cluster.drain_timeout_s)
        for worker in self._workers:
            self._directory.unregister(worker.ref.worker_id)
            await worker.stop()
        self._watch.close()

    def _build(self, role: Role, index: int, loaded: dict[str, LoadedModel]) -> RoleWorker:
        engine = self._config.engine_of(role)
        use_threads(engine.threads)
        key = f"{engine.model} {engine.max_context} {engine.device} {engine.dtype} {engine.cpu_kernels}"
        if key not in loaded:
            loaded[key] = load_model(engine)
        runner = ModelRunner(loaded[key], engine, step_limits(self._config))
        runner.warm_up()
        worker_id = WorkerId(f"{role.value}-{index}")
        ref = WorkerRef(worker_id, role, new_epoch(), f"{SCHEME}{worker_id}")
        surroundings = Surroundings(
            connect=lambda wanted: self._directory.connect, changed=self._enter, awake=self._watch.awake
        )
        worker = RoleWorker(runner, self._config, ref, self._clock, surroundings)
        self._directory.register(worker_id, worker.receiver)
        return worker

    async def _enter(self, worker: RoleWorker) -> None:
        """KV for it goes to the receiver of its new role."""
        self._directory.register(worker.ref.worker_id, worker.receiver)
