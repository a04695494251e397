"""RoleConfig: the section `cluster.roles` of the configuration. Owns its defaults; values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """When workers change their role by themselves, and how long that may take.

    `is_standing_in`: a prefill worker takes the decode role when no decode worker is left, and goes home when
    the pool has been back for `settle_s`, which it also stands in at least. A pool that never was there is
    filled after `first_wait_s`: until then it is starting. `order_s`: how long a worker has to follow an
    order before another one is chosen.

    `drain_s` is how long what runs on a worker may go on before it changes its role; what is left then moves
    to another worker. `urgent_drain_s` is the same when a pool is empty.
    """

    is_standing_in: bool = True
    settle_s: float = 5.0
    first_wait_s: float = 120.0
    order_s: float = 3.0
    drain_s: float = 5.0
    urgent_drain_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("settle_s", "first_wait_s", "order_s", "drain_s", "urgent_drain_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
