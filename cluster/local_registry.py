"""LocalRegistry: what the registry actor does, for the workers of this process.

Owns who hears which order; the decisions are those of the same tables. A worker announces itself whenever the
router looks. Lives on the router's and workers' one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from cluster.registry_table import RegistryTable
from cluster.role_config import RoleConfig
from cluster.role_table import RoleTable
from cluster.role_worker import RoleWorker
from core.clock import Clock
from core.ids import Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleChange, RoleOrder
from core.worker_status import Announcement

_log = logging.getLogger(__name__)


class LocalRegistry:
    """MembershipSource and RoleDesk of a router in the same process."""

    def __init__(self, config: RoleConfig, clock: Clock, workers: Mapping[WorkerId, RoleWorker]) -> None:
        self._workers = workers
        self._table = RegistryTable(clock)
        self._roles = RoleTable(config, clock, self._table)
        self._following: set[asyncio.Task[RoleChange]] = set()

    def end(self) -> None:
        """The service stops: nobody changes its role any more."""
        self._table.end_in(0.0)

    async def announcements(self) -> tuple[Announcement, ...]:
        for worker in self._workers.values():
            line = worker.announcement()
            self._table.announce(line)
            if (order := self._roles.heard(line)) is not None:
                self._follow(worker, order)
        return self._table.lines()

    async def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        return self._roles.fill(role, unusable)

    async def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        return self._roles.order(worker_id, role, cause, is_forced)

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        return await self._workers[order.worker.worker_id].change_role(order)

    def _follow(self, worker: RoleWorker, order: RoleOrder) -> None:
        task = asyncio.create_task(worker.change_role(order))
        self._following.add(task)
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[RoleChange]) -> None:
        self._following.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("an order was not followed: %s: %s", type(error).__name__, error)
