"""RayHead: a Ray cluster of one node with a job server, on ports of its own, started as `ray start` does.

Owns its processes and its folder; the cluster runs none of ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.ports import free_ports

_START_S = 120.0


@dataclass(frozen=True, slots=True)
class RayHead:
    """`url`: of the dashboard, which takes jobs."""

    url: str


@contextmanager
def start_ray_head() -> Iterator[RayHead]:
    """Up until the block ends; then nothing of it is left."""
    ports = free_ports("127.0.0.1", 3)
    with tempfile.TemporaryDirectory(prefix="rh", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
                    *(f"--port={ports[0]}", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}"),
                    *(f"--dashboard-agent-listen-port={ports[2]}", "--num-cpus=2", "--disable-usage-stats"),
                    *("--object-store-memory=80000000", f"--temp-dir={folder}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_memory_monitor_refresh_ms": "0"},
            )
        try:
            _wait(f"http://127.0.0.1:{ports[2]}/", process, log)
            yield RayHead(f"http://127.0.0.1:{ports[1]}")
        finally:
            _stop(process)


def _wait(agent_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the node's agent answers, whatever it says: it is what starts jobs."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            urllib.request.urlopen(agent_url, timeout=5)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"Ray did not start\n{log.read_text(errors='replace')[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for survivor in alive:
        survivor.kill()
    psutil.wait_procs(alive, timeout=10)
