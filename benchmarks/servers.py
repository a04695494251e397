"""Servers under test: read from a YAML file, started by their command, stopped with everything they started.

Owns the child process, its port, its log, and waiting until it answers. A server is anything that speaks
OpenAI's completions API; Baton's forms are entries like the others. Used on the benchmark's event loop.

The file: `servers`, a list of mappings with the fields of `ServerSpec`. `${PORT}` stands for the port in
`command`; other `${NAME}` are variables of the environment, in `command`, `version` and `environment`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

import orjson
import psutil
import yaml

from benchmarks.streaming import HOST, BrokenStream, Endpoint, fetch
from benchmarks.workloads import Workload
from cluster.ports import free_ports
from core.config import from_mapping

_POLL_S = 0.25
_LOG_TAIL = 4000


class StartFailed(Exception):
    """The server ended or did not become ready in time; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one server and what to ask of it.

    `is_peer`: the others are compared with it. `ready`: a path that answers 200 once it can serve. `version`:
    a command whose last line of output names it. `environment`: `NAME=value`. `workloads`: letters.
    `loadtest`: more arguments of `baton loadtest`, for what this server has its own way with.
    """

    name: str
    command: str
    is_peer: bool = False
    weights: str = ""
    environment: tuple[str, ...] = ()
    ready: str = "/health"
    version: str | None = None
    workloads: str = "ABCD"
    loadtest: str = ""
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 60.0

    def runs(self, workload: Workload) -> bool:
        return workload.value in self.workloads


def load_specs(file: Path) -> list[ServerSpec]:
    """Raises InvalidConfig for an unknown field or a wrong type, ValueError for anything else."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or set(tree) != {"servers"} or not isinstance(tree["servers"], list):
        raise ValueError(f"{file} must hold one list, named servers")
    specs = [from_mapping(ServerSpec, entry) for entry in tree["servers"]]
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"{file}: two servers have one name")
    return specs


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with each `${NAME}` replaced. Raises ValueError naming a variable that is not set."""
    try:
        return Template(text).substitute(variables)
    except KeyError as error:
        raise ValueError(f"the variable {error.args[0]} is not set, in: {text}") from error


def command_line(spec: ServerSpec, port: int) -> list[str]:
    return shlex.split(expanded(spec.command, {**os.environ, "PORT": str(port)}))


def environment_of(spec: ServerSpec) -> dict[str, str]:
    """This process's environment with the server's own variables."""
    own = (expanded(setting, os.environ).partition("=") for setting in spec.environment)
    return {**os.environ, **{name: value for name, _, value in own}}


def version_of(spec: ServerSpec) -> str:
    """What the version command says in its last line; empty without one."""
    if spec.version is None:
        return ""
    words = shlex.split(expanded(spec.version, os.environ))
    done = subprocess.run(
        words,
        env=environment_of(spec),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip().splitlines()[-1]


@asynccontextmanager
async def running(spec: ServerSpec, log: Path) -> AsyncIterator[Endpoint]:
    """The server, started and ready; at the end it and all its descendants are gone.

    Raises StartFailed, after taking down what was started.
    """
    port = free_port()
    process = _start(spec, port, log)
    try:
        yield Endpoint(port, await _until_ready(spec, process, port, log))
    finally:
        await asyncio.to_thread(_stop, process, spec.stop_timeout_s)


def free_port() -> int:
    return free_ports(HOST, 1)[0]


def _start(spec: ServerSpec, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        return subprocess.Popen(
            command_line(spec, port),
            env=environment_of(spec),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def _until_ready(spec: ServerSpec, process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """The name of the first model that the server lists."""
    deadline = time.monotonic() + spec.start_timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartFailed(f"{spec.name} ended with status {process.returncode}\n{_tail(log)}")
        try:
            if (await fetch(port, spec.ready))[0] == 200:
                status, body = await fetch(port, "/v1/models")
                if status == 200:
                    return str(orjson.loads(body)["data"][0]["id"])
        except (OSError, BrokenStream, TimeoutError):
            pass  # it does not listen yet, or is only about to
        await asyncio.sleep(_POLL_S)
    raise StartFailed(f"{spec.name} was not ready after {spec.start_timeout_s:.0f} s\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM to the process, then SIGKILL to what is left of it and its descendants."""
    descendants = _descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        descendants += _descendants(process.pid)
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=5)
    for survivor in alive:
        survivor.kill()
    psutil.wait_procs(alive, timeout=10)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
