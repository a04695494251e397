"""Prometheus: a real one, on a free port, for as long as the `with` lasts.

Owns its process and its HTTP API. It comes with Debian's package `prometheus`; `needs_prometheus` skips where
it is not.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from tests.e2e.harness import free_port
from tests.e2e.scrape import wait_until

PROGRAM = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None, reason="Prometheus is not installed (Debian package prometheus)"
)


class Prometheus:
    def __init__(self, configuration: Path, folder: Path) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        assert PROGRAM is not None
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples that an instant query returns."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": text}, timeout=10.0)
        body = answer.json()
        assert body["status"] == "success", f"{text}: {body}"
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        groups = httpx.get(f"{self._url}/api/v1/rules", timeout=10.0).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def __enter__(self) -> Prometheus:
        wait_until(self._why_not_ready, 20.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._log.close()

    def _why_not_ready(self) -> str:
        assert self._process.poll() is None, "Prometheus has ended"
        try:
            answer = httpx.get(f"{self._url}/-/ready", timeout=1.0)
        except httpx.TransportError as error:
            return f"{error!r}"
        return "" if answer.status_code == 200 else answer.text
