"""System: a running Baton in its own process group, started by the command line a user would type.

Owns the child process, its port, its log and the proof that nothing of it is left after it was stopped. It
knows no API; clients come from `client`. Used from the test's thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.ports import free_ports
from tests.e2e import wire
from tests.e2e.client import Client

ROOT = Path(__file__).resolve().parents[2]
BATON = str(Path(sys.executable).with_name("baton"))
MARK = "BATON_TEST_RUN"
STOP_S = 60.0
DRAIN_S = 4.0
# 11,648 tokens of the bundled model; several systems live side by side
KV_BYTES = 512 << 20
GREETING = "Ctrl-C stops it"


@dataclass(frozen=True, slots=True)
class Profile:
    """How to start a system: the model's folder (None: the bundled one), settings by section, workers, kind.

    `api_key` is shown by the system's own client. `is_local` is one process without Ray. `settings` are
    `{"engine.block_size": 16}`.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    num_prefill: int = 1
    num_decode: int = 1
    is_local: bool = True
    api_key: str | None = None

    def arguments(self, port: int, config: Path) -> list[str]:
        found = ["--config", str(config), "--port", str(port)]
        found += ["--prefill-replicas", str(self.num_prefill), "--decode-replicas", str(self.num_decode)]
        if self.is_local:
            found.append("--local")
        if self.model is not None:
            found += ["--model", str(self.model)]
        return found

    def configuration(self) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "cluster": {"drain_timeout_s": DRAIN_S},
            "engine": {"kv_cache_bytes": KV_BYTES},
        }
        for path, value in self.settings.items():
            *sections, key = path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
        return tree


class StartFailed(Exception):
    """The process ended, or was not ready in time; carries its log."""

    def __init__(self, why: str, log: str, exit_code: int | None) -> None:
        super().__init__(f"{why}\n--- log ---\n{log[-6000:]}")
        self.log = log
        self.exit_code = exit_code


class System:
    """A started system; `stop` (or leaving the `with`) ends it and proves that no process is left."""

    def __init__(self, profile: Profile, folder: Path, timeout_s: float | None = None) -> None:
        """Start, and wait until it is ready and has shown its sample. Raises StartFailed."""
        self.profile = profile
        self.port = free_port()
        self.log_path = folder / f"{profile.name}-{self.port}.log"
        self.mark = uuid.uuid4().hex
        config = folder / f"{profile.name}-{self.port}.yaml"
        config.write_text(yaml.safe_dump(profile.configuration()))
        command = [BATON, "serve", *profile.arguments(self.port, config)]
        self._is_stopped = False
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            )
        try:
            self._wait_ready(timeout_s or (60.0 if profile.is_local else 180.0))
            self.client = Client(self.port, api_key=profile.api_key)
        except BaseException:
            self.stop()
            raise

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All live processes of this system, found by the mark that each inherited."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def stop(self) -> float:
        """SIGTERM, wait, prove that nothing is left; returns the seconds it took. Once only."""
        if self._is_stopped:
            return 0.0
        self._is_stopped = True
        start = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        leftovers: list[str] = []
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            leftovers.append(f"the command itself (pid {self.process.pid}) after {STOP_S} s")
        took = time.monotonic() - start
        deadline = time.monotonic() + 5.0
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self.processes():
            leftovers.append(describe(process))
            _kill(process)
        self.process.wait(10.0)
        assert not leftovers, f"left over after the stop: {leftovers}\n--- log ---\n{self.log()[-3000:]}"
        return took

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise StartFailed(f"{self.profile.name} ended with code {code}", self.log(), code)
            if GREETING in self.log() and is_ready(self.port):
                return
            time.sleep(0.1)
        raise StartFailed(f"{self.profile.name} was not ready after {timeout_s:.0f} s", self.log(), None)


def is_ready(port: int) -> bool:
    try:
        return wire.request(port, "GET", "/ready").status == 200
    except OSError:
        return False


def free_port() -> int:
    """A port nobody listens on now."""
    return free_ports("127.0.0.1", 1)[0]


def refuse_to_start(profile: Profile, folder: Path, timeout_s: float = 60.0) -> str:
    """Start what must not start; returns its log. Fails if it becomes ready or ends as if all were well."""
    try:
        system = System(profile, folder, timeout_s)
    except StartFailed as error:
        failure = error
    else:
        system.stop()
        raise AssertionError(f"{profile.name} started, although it had to refuse\n{system.log()[-2000:]}")
    assert failure.exit_code not in (None, 0), f"did not end with an error: {failure}"
    return failure.log


def describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline())[:160]}"
    except psutil.NoSuchProcess:
        return f"pid {process.pid} (gone meanwhile)"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
