"""SimRoles: who decides about roles in the simulation: the registry's own tables, over the simulated wires.

Owns nothing but the way to them; a `router.role_watch.RoleDesk`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.registry_table import RegistryTable
from cluster.role_table import RoleTable
from core.clock import Clock
from core.errors import ServingError, StaleEpoch, WorkerDraining
from core.ids import Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleChange, RoleOrder
from core.worker_status import Announcement
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.workers import ROLES, Directory, Site


class SimRoles:
    """One per world."""

    def __init__(self, network: Network, directory: Directory, router: Process, clock: Clock) -> None:
        self._network = network
        self._directory = directory
        self._router = router
        self._table = RegistryTable(clock)
        self._roles = RoleTable(ROLES, clock, self._table)

    def heard(self, site: Site) -> Announcement:
        """The worker announces itself, and follows what it is told."""
        line = site.either.announcement()
        self._table.announce(line)
        order = self._roles.heard(line)
        if order is not None:
            site.process.spawn(_followed(site, order))
        return line

    async def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        return self._roles.fill(role, unusable)

    async def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        return self._roles.order(worker_id, role, cause, is_forced)

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        site = self._directory.find(order.worker.address)
        change: RoleChange = await self._network.call(
            self._router, site.process, lambda: site.either.change_role(order)
        )
        return change

    async def take(self, site: Site, role: Role) -> bool:
        """Have it take that role; False if it could not leave its own."""
        if site.process.is_dead:
            return True
        task = site.process.spawn(_followed(site, RoleOrder(site.ref, role, RoleCause.OPERATOR)))
        await asyncio.wait({task})
        return task.cancelled() or bool(task.result())


async def _followed(site: Site, order: RoleOrder) -> bool:
    """Whether it did, or had a reason not to."""
    try:
        await site.either.change_role(order)
    except (StaleEpoch, WorkerDraining):
        return True
    except ServingError:
        return False
    return True
