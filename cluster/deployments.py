"""The Ray Serve replicas: thin shells in which a router or a worker runs.

Owns what only exists because of Serve: names taken from the replica, health checks, drain in the destructor.
The work is done by `router.app` and `worker_host`. Constructors, health checks and destructors run on the
replica's main loop.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.config import BatonConfig
from cluster.registry import RegistryClient, RegistryHerald, RegistryMembership
from cluster.worker_host import WorkerHost
from core.ids import Role, WorkerId
from router.app import create_app
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker

_LOOPBACK = "127.0.0.1"


class WorkerShell:
    """One worker process of the pool `role`."""

    def __init__(self, config: BatonConfig, role: Role) -> None:
        logging.basicConfig(level=logging.INFO)
        replica = serve.get_replica_context().replica_id
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._host = WorkerHost(
            config,
            role,
            WorkerId(f"{role.value}-{replica.unique_id}"),
            host=_LOOPBACK if config.cluster.is_own else ray.util.get_node_ip_address(),
            herald=RegistryHerald(RegistryClient()),
        )

    def check_health(self) -> None:
        self._host.check_health()

    async def __del__(self) -> None:
        """Serve calls it when the replica stops, within graceful_shutdown_timeout_s."""
        host = self.__dict__.pop("_host", None)
        if host is not None:
            await host.stop(self._drain_timeout_s)


@serve.ingress()
class RouterShell:
    """One router replica. `pools` are handles to the workers' deployments: being arguments makes them part of
    the application.
    """

    def __init__(self, config: BatonConfig, *pools: Any) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = config

    def __serve_build_asgi_app__(self) -> Any:
        model = ServedModel.load(Path(self._config.decode_engine.model), self._config.router.model_name)
        return create_app(self._config.router, model, RegistryMembership(RegistryClient()), GrpcWorker)
