"""RoleTable: who is to change its role. The one place where that is decided.

Owns the orders that are given and not yet followed, since when each worker has its role, and which workers
somebody could not use lately. The lines themselves are the registry table's. Soft state: what a change was
for travels in the announcements. Deterministic, no time of its own; used where the registry lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.registry_table import RegistryTable
from cluster.role_config import RoleConfig
from core.clock import Clock
from core.errors import LastOfRole, UnknownWorker
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleOrder
from core.worker_status import Announcement

_Incarnation = tuple[WorkerId, Epoch]


@dataclass(frozen=True, slots=True)
class _Pending:
    order: RoleOrder
    given_at: float


class RoleTable:
    """Orders by worker. `table` is asked who is there."""

    def __init__(self, config: RoleConfig, clock: Clock, table: RegistryTable) -> None:
        self._config = config
        self._clock = clock
        self._table = table
        self._born = clock.now()
        self._pending: dict[WorkerId, _Pending] = {}
        self._since: dict[_Incarnation, float] = {}
        self._unusable_until: dict[_Incarnation, float] = {}
        self._known_roles: set[Role] = set()

    def heard(self, line: Announcement) -> RoleOrder | None:
        """The worker has announced itself; what it is to do, if anything. Said again until it has."""
        worker_id, now = line.ref.worker_id, self._clock.now()
        self._since = {
            name: at for name, at in self._since.items() if name[0] != worker_id or name == _name(line.ref)
        }
        self._since.setdefault(_name(line.ref), now)
        self._known_roles.add(line.ref.role)
        pending = self._pending.get(worker_id)
        is_meant = pending is not None and pending.order.worker.epoch == line.ref.epoch
        if pending is not None and is_meant and not self._is_needless(pending.order, now):
            return pending.order
        self._pending.pop(worker_id, None)  # followed, needless, or meant for a process that is gone
        return self._give(line, line.home, RoleCause.POOL_BACK) if self._may_go_home(line, now) else None

    def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        """A router has no worker of `role` that it could use, of which it knows `unusable` (of any role).

        Returns whom to send there: the same worker for all who ask. None while somebody is there whom the
        router does not know yet, while the pool is starting, or when nobody can be spared.
        """
        now = self._clock.now()
        self._unusable_until = {name: at for name, at in self._unusable_until.items() if at > now}
        for ref in unusable:
            self._unusable_until[_name(ref)] = now + self._config.settle_s
            self._known_roles.add(ref.role)  # it was there, also if that was before this registry
        if not self._config.is_standing_in or self._table.is_ending:
            return None
        lost = {_name(ref) for ref in unusable}
        there = [line for line in self._table.lines() if _name(line.ref) not in lost]
        if any(line.ref.role is role for line in there):
            return None
        late: set[WorkerId] = set()
        for line in there:
            pending = self._pending.get(line.ref.worker_id)
            if pending is not None and pending.order.role is role and pending.order.worker == line.ref:
                if now - pending.given_at < self._config.order_s:
                    return pending.order
                late.add(line.ref.worker_id)
        is_starting = role not in self._known_roles and now - self._born < self._config.first_wait_s
        if is_starting or not there:
            return None
        chosen = min(
            there,
            key=lambda line: (
                line.ref.worker_id in late,
                line.cause is RoleCause.OPERATOR,
                line.home is not role,
                line.ref.worker_id,
            ),
        )
        return self._give(chosen, role, RoleCause.EMPTY_POOL)

    def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        """Have a worker take `role`; None if it has it.

        Raises UnknownWorker, or LastOfRole if nobody else would be left in the role that it has.
        """
        lines = {line.ref.worker_id: line for line in self._table.lines()}
        line = lines.get(worker_id)
        if line is None:
            known = ", ".join(sorted(lines)) or "none"
            raise UnknownWorker(f"there is no worker {worker_id[:100]!r}; known are: {known}", param="worker")
        if line.ref.role is role:
            self._pending.pop(worker_id, None)
            return None
        others = [
            other
            for name, other in lines.items()
            if name != worker_id and other.ref.role is line.ref.role and name not in self._pending
        ]
        if not others and not is_forced:
            raise LastOfRole(
                f"{worker_id} is the last {line.ref.role} worker: without it the service is degraded",
                param="worker",
            )
        return self._give(line, role, cause)

    def _give(self, line: Announcement, role: Role, cause: RoleCause) -> RoleOrder:
        order = RoleOrder(line.ref, role, cause)
        self._pending[line.ref.worker_id] = _Pending(order, self._clock.now())
        return order

    def _is_needless(self, order: RoleOrder, now: float) -> bool:
        """The pool that it was to fill has a worker again."""
        return order.cause is RoleCause.EMPTY_POOL and any(
            line.ref.role is order.role and self._unusable_until.get(_name(line.ref), now) <= now
            for line in self._table.lines()
        )

    def _may_go_home(self, line: Announcement, now: float) -> bool:
        """A stand-in, when the pool has been whole for a while, and so long after it came. Not while the
        service stops: what runs there has no time to move.
        """
        if not line.is_stand_in or self._table.is_ending:
            return False
        if now - self._since[_name(line.ref)] < self._config.settle_s:
            return False
        return any(
            other.ref.role is line.ref.role
            and not other.is_stand_in
            and other.ref.worker_id not in self._pending
            and now - self._since.get(_name(other.ref), now) >= self._config.settle_s
            and self._unusable_until.get(_name(other.ref), now) <= now
            for other in self._table.lines()
        )


def _name(ref: WorkerRef) -> _Incarnation:
    return (ref.worker_id, ref.epoch)
