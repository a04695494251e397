"""A worker's change of role: why it is wanted, who is to do it, and what became of it.

Values only. Who decides is `cluster.role_table`, who does it `cluster.role_worker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.ids import Role, WorkerRef


class RoleCause(StrEnum):
    """EMPTY_POOL: no other worker was left in that role. POOL_BACK: its stand-in goes home. OPERATOR and
    AUTOSCALER: they said so; such a worker stays until it is told otherwise.
    """

    EMPTY_POOL = "empty_pool"
    POOL_BACK = "pool_back"
    OPERATOR = "operator"
    AUTOSCALER = "autoscaler"


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """`worker`, this incarnation of it, is to take `role`."""

    worker: WorkerRef
    role: Role
    cause: RoleCause


@dataclass(frozen=True, slots=True)
class RoleChange:
    """An order that was carried out. `ref`: the worker from now on, of a new epoch. `drain_s`: until all that
    ran under the old role had ended; `start_s`: from then until the new role was served.
    """

    ref: WorkerRef
    drain_s: float
    start_s: float
