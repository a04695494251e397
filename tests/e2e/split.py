"""SplitSystem: router, prefill and decode as separate processes over real gRPC, with a meddler on the bridge.

Owns the wiring that a cluster does otherwise, so that the bytes between prefill and decode can be cut or
damaged. The router runs in a thread of the test's process; both workers are child processes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from cluster.config import config_from_settings
from cluster.security import peer_security
from core.ids import Role, WorkerRef
from core.peer_security import new_cluster_token
from core.worker_status import Announcement
from router.app import create_app
from router.served_model import ServedModel
from router.worker_clients import GrpcWorker
from router.workers import Worker
from tests.e2e.client import Client
from tests.e2e.harness import ROOT, free_port, is_ready
from tests.e2e.meddler import Meddler
from tests.e2e.scrape import wait_until

START_S = 90.0


class WorkerProcess:
    """A worker's child process; ends when its standard input is closed. It listens on `host`; `before` are
    the words of a command that runs it elsewhere.
    """

    def __init__(
        self,
        role: Role,
        settings: dict[str, Any],
        log: Path,
        name: str | None = None,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        worker_id = name or f"{role.value}-0"
        spec = {"role": role.value, "worker_id": worker_id, "settings": settings, "host": host}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "tests.e2e.worker_process", json.dumps(spec)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
            )
        self._log = log

    def announcement(self) -> Announcement:
        """Blocks until the worker has started."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended\n{self._log.read_text()[-3000:]}"
        found: Announcement = pickle.loads(base64.b64decode(line))
        return found

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5.0)
            raise
        finally:
            self.process.stdout.close()


class Membership:
    """A fixed list of workers."""

    def __init__(self, announcements: tuple[Announcement, ...]) -> None:
        self._announcements = announcements

    async def announcements(self) -> tuple[Announcement, ...]:
        return self._announcements


class SplitSystem:
    """A running system; prefill reaches decode only through `bridge`."""

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
        roles = (Role.PREFILL, Role.DECODE)
        self._workers = [WorkerProcess(role, settings, folder / f"{role.value}.log") for role in roles]
        self.pids = {role: worker.process.pid for role, worker in zip(roles, self._workers, strict=True)}
        prefill, decode = (worker.announcement() for worker in self._workers)
        self.decode_port = int(decode.ref.address.rsplit(":", 1)[1])
        self.block_bytes = decode.layout.block_bytes
        self.bridge = Meddler(self.decode_port)
        direct = decode.ref.address
        listed = dataclasses.replace(
            decode, ref=dataclasses.replace(decode.ref, address=f"127.0.0.1:{self.bridge.port}")
        )

        def connect(ref: WorkerRef) -> Worker:
            """The router reaches decode directly: the bridge is prefill's way alone."""
            is_listed = ref.address == listed.ref.address
            return GrpcWorker(dataclasses.replace(ref, address=direct) if is_listed else ref, security)

        app = create_app(
            config.router,
            ServedModel.load(model, config.router.model_name),
            Membership((prefill, listed)),
            connect,
        )
        self.port = free_port()
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run, name="router", daemon=True)
        self._thread.start()
        wait_until(lambda: "" if is_ready(self.port) else "the router is not ready", START_S)
        self.client = Client(self.port)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20.0)
        self.bridge.close()
        for worker in self._workers:
            worker.stop()
        assert not self._thread.is_alive(), "the router did not stop"

    def __enter__(self) -> SplitSystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
