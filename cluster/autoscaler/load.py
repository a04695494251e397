"""Load: what a scaling decision is made from.

Values only, without a clock, and every one of them can be written as JSON and read back. None means unknown,
which is never the same as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from core.ids import Role

_MAX_SWAY = 0.5


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that reports. `home`: the pool whose replica it is; `role`: the phase it runs. A stand-in
    fills an empty pool until that is back; one that is pinned stays as an operator said.

    Token counts are uncached prompt tokens still to be computed. `prefill_tokens_per_s` and the seconds of a
    step, `step_base_s + streams × step_stream_s`, are None until they are measured.
    """

    worker_id: str
    home: Role
    role: Role
    is_draining: bool
    is_stand_in: bool
    is_pinned: bool
    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_running_tokens: int
    num_kv_tokens: int
    num_held_tokens: int
    max_num_seqs: int
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    step_base_s: float | None = None
    step_stream_s: float | None = None

    @property
    def is_away(self) -> bool:
        return self.role is not self.home and not self.is_stand_in

    @property
    def is_busy(self) -> bool:
        return self.num_waiting + self.num_running > 0


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """All routers together, over the last window.

    `num_waiting` requests, with `num_waiting_tokens` of prompt, have no worker yet; `num_open` are inside.
    `num_arrived`: how many the two rates were counted from. `growth_per_s`: by what share of itself the
    arrival rate grows each second, 0 unless it does steadily. `cached_share` of prompt tokens was found
    cached. The three waits are means of those that ended.
    """

    num_open: int
    num_waiting: int
    num_waiting_tokens: int
    arrivals_per_s: float
    tokens_per_s: float
    num_arrived: int = 0
    growth_per_s: float = 0.0
    cached_share: float = 0.0
    num_output_tokens: float | None = None
    itl_s: float | None = None
    router_wait_s: float | None = None
    queue_wait_s: float | None = None
    transfer_wait_s: float | None = None

    def at(self, sway: float) -> RouterLoad:
        """As if arrivals were off by so many standard deviations: few that were counted tell little."""
        factor = 1.0 + sway * min(_MAX_SWAY, 1.0 / math.sqrt(max(1, self.num_arrived)))
        return replace(
            self, arrivals_per_s=self.arrivals_per_s * factor, tokens_per_s=self.tokens_per_s * factor
        )

    @property
    def uncached_tokens_per_s(self) -> float:
        return self.tokens_per_s * (1.0 - self.cached_share)

    @property
    def num_prompt_tokens(self) -> float | None:
        """Of one request; None if none came."""
        return self.tokens_per_s / self.arrivals_per_s if self.arrivals_per_s > 0 else None


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Replicas of a pool: asked for, and running."""

    num_target: int
    num_running: int


@dataclass(frozen=True, slots=True)
class Load:
    """`router` is None unless every router reports; `workers` are those that do."""

    prefill: PoolCount
    decode: PoolCount
    workers: tuple[WorkerLoad, ...]
    router: RouterLoad | None
    gpus_per_worker: float = 0.0

    def pool(self, role: Role) -> PoolCount:
        return self.prefill if role is Role.PREFILL else self.decode

    def of_role(self, role: Role) -> tuple[WorkerLoad, ...]:
        return tuple(worker for worker in self.workers if worker.role is role and not worker.is_draining)

    def at(self, sway: float) -> Load:
        """See RouterLoad.at."""
        return self if self.router is None else replace(self, router=self.router.at(sway))

    @property
    def is_complete(self) -> bool:
        """Whether everyone who runs reports."""
        return self.router is not None and all(
            sum(worker.home is role for worker in self.workers) >= self.pool(role).num_running
            for role in Role
        )

    def num_away(self, home: Role) -> int:
        """Workers of the pool `home` that run the other phase, and not only until that is back."""
        return sum(worker.is_away and worker.home is home for worker in self.workers)

    def supply(self, role: Role) -> int:
        """Workers that run or will run the phase, once all replicas are as asked for."""
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return max(0, self.pool(role).num_target - self.num_away(role) + self.num_away(other))

    @property
    def is_idle(self) -> bool:
        """Nothing is asked and nothing runs, as far as is known."""
        is_asked = self.router is None or self.router.num_open > 0 or self.router.arrivals_per_s > 0
        return not is_asked and not any(worker.is_busy for worker in self.workers)


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
