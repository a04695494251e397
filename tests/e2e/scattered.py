"""Scattered: a prefill and two decode workers on hosts of their own, the router outside, cables between them.

Owns the wiring that a cluster does otherwise (see `namespaces`). The router runs in a thread of the test's
process, each worker is a child process in its namespace.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import uvicorn

from cluster.config import config_from_settings
from cluster.security import peer_security
from core.ids import Role
from core.peer_security import new_cluster_token
from router.app import create_app
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker
from tests.e2e.client import Client
from tests.e2e.harness import free_port, is_ready
from tests.e2e.namespaces import Cables
from tests.e2e.scrape import wait_until
from tests.e2e.split import START_S, Membership, WorkerProcess

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


class ScatteredSystem:
    """A running system; `cables` cuts its hosts off from each other."""

    def __init__(self, model: Path, settings: dict[str, Any], folder: Path) -> None:
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(new_cluster_token().secret)
        settings = {
            **settings,
            "engine": {**settings.get("engine", {}), "model": str(model)},
            "security": {"token_file": str(token_file)},
        }
        config = config_from_settings(settings)
        security = peer_security(config.security, None)
        self.cables = Cables(ROLES)
        self._workers: list[WorkerProcess] = []
        self._thread: threading.Thread | None = None
        try:
            for name, role in ROLES.items():
                log, inside = folder / f"{name}.log", self.cables.inside(name)
                host = self.cables.addresses[name]
                self._workers.append(WorkerProcess(role, settings, log, name, host, inside))
            announced = tuple(worker.announcement() for worker in self._workers)
            app = create_app(
                config.router,
                ServedModel.load(model, config.router.model_name),
                Membership(announced),
                lambda ref: GrpcWorker(ref, security),
            )
            self.port = free_port()
            self._server = uvicorn.Server(
                uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", ws="none")
            )
            self._thread = threading.Thread(target=self._server.run, name="router", daemon=True)
            self._thread.start()
            wait_until(lambda: "" if is_ready(self.port) else "the router is not ready", START_S)
            self.client = Client(self.port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(20.0)
        try:
            for worker in self._workers:
                worker.stop()
        finally:
            self.cables.close()
        assert self._thread is None or not self._thread.is_alive(), "the router did not stop"

    def __enter__(self) -> ScatteredSystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
