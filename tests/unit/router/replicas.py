"""Several routers' quotas on one owner of the limits, under a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.limit_table import LimitTable
from core.errors import QuotaExceeded
from core.ids import TenantId
from router.leases import Leases
from router.limits import Orders, Report
from router.quotas import CallCost, Grant, Quotas
from router.tenants import Tenant
from router.tenants_config import TenantLimits
from tests.doubles import FakeClock, settle

PERIOD_S = 0.25


class Owner:
    """The real table; it can be taken away, or reborn without its memory."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.is_away = False
        self.table = LimitTable(clock)

    def be_reborn(self) -> None:
        self.table = LimitTable(self._clock)

    async def exchange(self, report: Report) -> Orders:
        await asyncio.sleep(0)
        if self.is_away:
            raise ConnectionError("away")
        return self.table.exchange(report)


class Replica:
    def __init__(self, owner: Owner, clock: FakeClock, num_replicas: int) -> None:
        self.leases = Leases(owner, clock, PERIOD_S, num_replicas)
        self.quotas = Quotas(self.leases, clock)
        self.is_dead = False


class Service:
    """`num_replicas` routers and their owner; `log` is (when, tokens) of what was let in,
    `told` when a refused call may come back."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.clock = FakeClock()
        self.owner = Owner(self.clock)
        self.replicas = [Replica(self.owner, self.clock, num_replicas) for _ in range(num_replicas)]
        self.log: deque[tuple[float, int]] = deque()
        self.refusals: list[QuotaExceeded] = []
        self.told: dict[int, float] = {}
        self._calls: set[asyncio.Task[Grant | QuotaExceeded]] = set()
        self._number = 0

    def send(
        self, index: int, tenant: Tenant, num_prompt: int, max_output: int = 0, call: int | None = None
    ) -> asyncio.Task[Grant | QuotaExceeded]:
        self._number += 1
        cost = CallCost(num_prompt, max_output, self._number if call is None else call)
        task = asyncio.create_task(self._call(self.replicas[index], tenant, cost))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _call(self, replica: Replica, tenant: Tenant, cost: CallCost) -> Grant | QuotaExceeded:
        try:
            grant = await replica.quotas.admit(tenant, cost)
        except QuotaExceeded as error:
            self.refusals.append(error)
            self.told[cost.call] = self.clock.now() + float(str(error.details["retry_after_s"]))
            return error
        self.log.append((self.clock.now(), cost.num_prompt_tokens))
        return grant

    async def pass_by(self, seconds: float) -> None:
        """Rounds of all replicas, as often as they want them."""
        end = self.clock.now() + seconds
        while self.clock.now() < end - 1e-9:
            for replica in self.replicas:
                if not replica.is_dead:
                    await replica.leases.square()
            await settle(10)
            self.clock.advance(min(PERIOD_S / 5, end - self.clock.now()))
        await settle(10)

    def let_in(self, start: float, end: float) -> int:
        return sum(amount for at, amount in self.log if start <= at < end)

    def most_in_a_minute(self) -> int:
        return max((self.let_in(at, at + 60.0) for at, _ in self.log), default=0)


def new_tenant(**limits: int) -> Tenant:
    name = TenantId("acme")
    return Tenant(name, TenantLimits(name, **limits), name)  # type: ignore[arg-type]
