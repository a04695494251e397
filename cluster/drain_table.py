"""DrainTable: which worker is to be drained and replaced. Decided in one place, for all routers.

Owns the orders that are given and not yet followed. Who is there is the registry table's. Soft state: a
registry that dies forgets an order that was not heard yet, and whoever gave it learns that. Deterministic, no
time of its own; used where the registry lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.registry_table import RegistryTable
from core.clock import Clock
from core.errors import LastOfRole, UnknownWorker
from core.ids import Epoch, WorkerId
from core.worker_status import Announcement

# a worker announces itself each second: one that has not heard it by then is gone or hangs
_HEARD_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """The process `process_epoch` of that name is to take no new work, and ends when what runs has ended or
    `within_s` (None: as long as is configured for a drain) are over, after which the rest goes on elsewhere.
    """

    worker_id: WorkerId
    process_epoch: Epoch
    within_s: float | None


class DrainTable:
    """Orders by worker. `table` is asked who is there."""

    def __init__(self, clock: Clock, table: RegistryTable) -> None:
        self._clock = clock
        self._table = table
        self._pending: dict[WorkerId, tuple[DrainOrder, float]] = {}

    def heard(self, line: Announcement) -> DrainOrder | None:
        """The worker has announced itself; what it is to do, if anything. Said again until it has gone."""
        oldest = self._clock.now() - _HEARD_WITHIN_S
        self._pending = {name: item for name, item in self._pending.items() if item[1] > oldest}
        order, _ = self._pending.get(line.ref.worker_id, (None, 0.0))
        return order if order is not None and order.process_epoch == line.block_epoch else None

    def order(self, worker_id: WorkerId, within_s: float | None, is_forced: bool = False) -> DrainOrder:
        """Have a worker drained; the same again while it is on its way.

        Raises UnknownWorker, or LastOfRole if nobody else would be left in its role.
        """
        lines = {line.ref.worker_id: line for line in self._table.lines()}
        line = lines.get(worker_id)
        if line is None:
            known = ", ".join(sorted(lines)) or "none"
            raise UnknownWorker(f"there is no worker {worker_id[:100]!r}; known are: {known}", param="worker")
        has_others = any(
            other.ref.role is line.ref.role and name != worker_id and self.heard(other) is None
            for name, other in lines.items()
        )
        if not has_others and not is_forced:
            raise LastOfRole(
                f"{worker_id} is the last {line.ref.role} worker: until another one has started, the service "
                "is degraded",
                param="worker",
            )
        order = self.heard(line) or DrainOrder(worker_id, line.block_epoch, within_s)
        self._pending[worker_id] = (order, self._clock.now())
        return order
