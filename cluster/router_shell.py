"""RouterShell: the Ray Serve replica in which a router answers HTTP.

Owns handing Serve the router's ASGI application; Serve runs it, lifespan included, on the replica's main
loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve

from cluster.autoscaler.news import ScalingCollector
from cluster.autoscaler.router_side import RouterScaling
from cluster.autoscaler.stats import Stats
from cluster.config import BatonConfig
from cluster.logs import configure_logging
from cluster.registry import RegistryClient, RegistryDrains, RegistryLimitOwner, RegistryMembership
from cluster.role_desk import ClusterRoleDesk
from cluster.security import peer_security
from core.clock import MonotonicClock
from core.ids import WorkerRef
from core.peer_security import ClusterToken
from router.app import create_app
from router.collector import collect_less_often
from router.config import RouterConfig
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker


@serve.ingress()
class RouterShell:
    """One router replica. `pools` are handles of the workers' deployments: being arguments makes them part of
    the application.
    """

    def __init__(self, config: BatonConfig, token: ClusterToken | None, *pools: Any) -> None:
        configure_logging(config.logging)
        collect_less_often()
        self._config = config
        self._security = peer_security(config.security, token)

    def __serve_build_asgi_app__(self) -> Any:
        model = ServedModel.load(Path(self._config.decode_engine.model), self._config.router.model_name)
        registry = RegistryClient()
        membership = RegistryMembership(registry, self._on_ending)
        scaling = self._scaling(registry)
        self._app = create_app(
            self._router_config(),
            model,
            membership,
            self._connect,
            limit_owner=RegistryLimitOwner(RegistryClient()),
            roles=ClusterRoleDesk(RegistryClient(), self._security),
            drains=RegistryDrains(RegistryClient()),
            num_routers=self._config.cluster.num_routers,
            asleep=tuple if scaling is None else scaling.asleep,
        )
        if scaling is not None:
            self._app.state.metrics.registry.register(ScalingCollector(scaling.latest))
            self._keeping = asyncio.get_running_loop().create_task(scaling.keep(), name="scaling")
        return self._app

    def record_autoscaling_stats(self) -> Stats:
        """Serve asks each second and takes it to the autoscaler."""
        app = self.__dict__.get("_app")
        return {} if app is None else app.state.metrics.work.stats()

    def _scaling(self, registry: RegistryClient) -> RouterScaling | None:
        config = self._config.autoscaling
        if not config.is_enabled:
            return None
        return RouterScaling(config, lambda: registry.call("scaling"), MonotonicClock())

    def _router_config(self) -> RouterConfig:
        """Where decode may be at zero, a request waits for it as long as its deadline lets it."""
        config, scaling = self._config.router, self._config.autoscaling
        if not scaling.is_enabled or scaling.min_decode_workers > 0:
            return config
        return replace(config, worker_wait_s=config.max_timeout_s)

    def _connect(self, ref: WorkerRef) -> GrpcWorker:
        return GrpcWorker(ref, self._security)

    def _on_ending(self, seconds: float) -> None:
        """What is still open then ends with an error; Serve would cut it a little later."""
        asyncio.get_running_loop().call_later(seconds, self._app.state.close)
