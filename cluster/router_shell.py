"""RouterShell: the Ray Serve replica in which a router answers HTTP.

Owns handing Serve the router's ASGI application; Serve runs it, lifespan included, on the replica's main
loop.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from ray import serve

from cluster.config import BatonConfig
from cluster.registry import RegistryClient, RegistryLimitOwner, RegistryMembership
from cluster.security import peer_security
from core.ids import WorkerRef
from core.peer_security import ClusterToken
from router.app import create_app
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker


@serve.ingress()
class RouterShell:
    """One router replica. `pools` are handles of the workers' deployments: being arguments makes them part of
    the application.
    """

    def __init__(self, config: BatonConfig, token: ClusterToken | None, *pools: Any) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._security = peer_security(config.security, token)

    def __serve_build_asgi_app__(self) -> Any:
        model = ServedModel.load(Path(self._config.decode_engine.model), self._config.router.model_name)
        membership = RegistryMembership(RegistryClient(), self._on_ending)
        self._app = create_app(
            self._config.router,
            model,
            membership,
            self._connect,
            limit_owner=RegistryLimitOwner(RegistryClient()),
            num_routers=self._config.cluster.num_routers,
        )
        return self._app

    def _connect(self, ref: WorkerRef) -> GrpcWorker:
        return GrpcWorker(ref, self._security)

    def _on_ending(self, seconds: float) -> None:
        """What is still open then ends with an error; Serve would cut it a little later."""
        asyncio.get_running_loop().call_later(seconds, self._app.state.close)
