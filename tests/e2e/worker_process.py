"""One worker in a process of its own, without Ray: `python -m tests.e2e.worker_process SPEC`.

Owns nothing but the wiring: the worker is the product's own host. Prints its announcement as one line, then
serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import json
import pickle
import signal
import sys
from collections.abc import Callable

from cluster.config import config_from_settings
from cluster.security import peer_security
from cluster.worker_host import WorkerHost
from core.ids import Role, WorkerId
from core.role_change import RoleOrder
from core.worker_status import Announcement


class PrintingHerald:
    """Announces on standard output, once."""

    async def keep_announcing(
        self, announcement: Callable[[], Announcement], follow: Callable[[RoleOrder], None]
    ) -> None:
        print(base64.b64encode(pickle.dumps(announcement())).decode(), flush=True)
        await asyncio.Event().wait()

    async def announce(self, announcement: Announcement) -> RoleOrder | None:
        return None

    async def withdraw(self, announcement: Announcement) -> None:
        del announcement

    async def members(self) -> tuple[Announcement, ...] | None:
        return None


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # where its threads are, into the log
    spec = json.loads(sys.argv[1])
    role = Role(spec["role"])
    config = config_from_settings(spec["settings"])
    host = WorkerHost(
        config,
        role,
        WorkerId(spec["worker_id"]),
        host=spec["host"],
        herald=PrintingHerald(),
        security=peer_security(config.security, None),
    )
    sys.stdin.read()
    asyncio.run(host.stop(1.0))


if __name__ == "__main__":
    main()
