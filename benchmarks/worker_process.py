"""One worker in a process of its own, without Ray: `python -m benchmarks.worker_process SPEC`.

Owns nothing but the wiring: the worker is the product's own host. Prints its ref as a line of JSON, then
serves until its standard input ends. `worker_processes` starts them and takes them down.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import config_from_settings
from cluster.security import peer_security
from cluster.worker_host import WorkerHost
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.role_change import RoleOrder
from core.worker_status import Announcement

ROOT = Path(__file__).parents[1]
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`settings` are those of a configuration file."""

    worker_id: WorkerId
    role: Role
    settings: Mapping[str, Any]


class PrintingHerald:
    """Announces on standard output, once."""

    async def keep_announcing(
        self, announcement: Callable[[], Announcement], follow: Callable[[RoleOrder], None]
    ) -> None:
        ref = announcement().ref
        print(json.dumps({"epoch": ref.epoch, "address": ref.address}), flush=True)
        await asyncio.Event().wait()

    async def announce(self, announcement: Announcement) -> RoleOrder | None:
        return None

    async def withdraw(self, announcement: Announcement) -> None:
        del announcement

    async def members(self) -> tuple[Announcement, ...] | None:
        return None


@contextmanager
def worker_processes(specs: Sequence[WorkerSpec]) -> Iterator[dict[WorkerId, tuple[WorkerRef, int]]]:
    """Running workers by their ids: where each is, and its process id. Raises RuntimeError if one does not
    start; its words are on standard error.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for spec in specs:
            words = {"worker_id": spec.worker_id, "role": spec.role.value, "settings": dict(spec.settings)}
            command = [sys.executable, "-m", "benchmarks.worker_process", json.dumps(words)]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        found = {}
        for spec, process in zip(specs, processes, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"worker {spec.worker_id} did not start")
            said = json.loads(line)
            ref = WorkerRef(spec.worker_id, spec.role, Epoch(said["epoch"]), said["address"])
            found[spec.worker_id] = (ref, process.pid)
        yield found
    finally:
        for process in processes:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def main() -> None:
    words = json.loads(sys.argv[1])
    config = config_from_settings(words["settings"])
    worker_id, role = WorkerId(words["worker_id"]), Role(words["role"])
    security = peer_security(config.security, None)
    host = WorkerHost(config, role, worker_id, "127.0.0.1", PrintingHerald(), security)
    sys.stdin.read()
    asyncio.run(host.stop(0.0))


if __name__ == "__main__":
    main()
