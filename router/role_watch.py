"""RoleWatch: sees that nobody decodes any more, and has a prefill worker step in.

Owns noticing, and telling the chosen worker; who is chosen is decided in one place for all routers, behind
RoleDesk. Requests wait in the pipeline meanwhile. Lives on the event loop, inside each router.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from core.clock import Clock
from core.errors import ServingError
from core.ids import Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleChange, RoleOrder
from router.worker_entry import WorkerEntry, WorkerState
from router.worker_table import Sleep, WorkerTable

_AGAIN_S = 0.2
# a worker that is listed answers within a moment, or not at all
_CONNECT_S = 2.0
_LOOK_S = 3600.0
# so long may filling the pool take before the service counts as unable to answer
_PATIENCE_S = 5.0

_log = logging.getLogger(__name__)


class RoleDesk(Protocol):
    """Who decides about roles. All may raise ConnectionError while that one is away."""

    async def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        """Nobody of `role` can be used, knowing `unusable`: who is to step in, the same for all who ask."""
        ...

    async def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        """None if it has the role. Raises UnknownWorker, or LastOfRole unless forced."""
        ...

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        """Have the worker do it, and wait for that. Raises ServingError."""
        ...


class RoleWatch:
    """One per router; `run` for as long as it serves."""

    def __init__(self, table: WorkerTable, desk: RoleDesk | None, clock: Clock, sleep: Sleep) -> None:
        self._table = table
        self._desk = desk
        self._clock = clock
        self._sleep = sleep
        self._was_there = False
        self._lacking_since: float | None = None
        self._ordered: WorkerId | None = None

    @property
    def is_filling(self) -> bool:
        """Nobody decodes, but somebody is about to: requests wait for that, and not for long."""
        if self._desk is None or not self._was_there:
            return False
        # while it changes its role, it has neither
        if self._ordered is None and not self._table.usable(Role.PREFILL):
            return False
        if any(
            entry.ref.worker_id == self._ordered and entry.state is WorkerState.SUSPECT
            for entry in self._table.entries()
        ):
            return False  # it hangs, too
        since = self._lacking_since
        return since is None or self._clock.now() - since < _PATIENCE_S

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._table.usable(Role.DECODE):
                self._was_there = True
                self._lacking_since = None
                self._ordered = None
                await self._table.wait_for_change(_LOOK_S)
                continue
            if self._lacking_since is None:
                self._lacking_since = self._clock.now()
            if self._desk is not None and await self._fill(self._desk):
                continue
            await self._table.wait_for_change(_AGAIN_S)

    async def _fill(self, desk: RoleDesk) -> bool:
        """Whether the table may have changed by it."""
        if not self._table.usable(Role.PREFILL):
            return False
        unusable = [entry.ref for entry in self._table.entries() if self._is_unusable(entry)]
        try:
            order = await desk.fill(Role.DECODE, unusable)
            if order is not None:
                self._ordered = order.worker.worker_id
                _log.warning("no decode worker is left: %s steps in", order.worker.worker_id)
                await desk.carry_out(order)
        except ConnectionError as error:
            _log.warning("nobody steps in for the decode workers: %s", error)
            return False
        except ServingError as error:
            # perhaps it has done so already, told by another router
            _log.info("the order was not taken: %s: %s", error.code, error.message)
        except Exception:  # noqa: BLE001 - logged; whoever watches must not stop
            _log.exception("nobody steps in for the decode workers")
            return False
        await self._table.refresh()
        return bool(self._table.usable(Role.DECODE))

    def _is_unusable(self, entry: WorkerEntry) -> bool:
        is_connecting = (
            entry.state is WorkerState.CONNECTING and self._clock.now() - entry.heard_at < _CONNECT_S
        )
        return not entry.is_usable and not is_connecting
