"""Who comes back when told is let in, at whichever router, though news of bookings take their time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from cluster.limit_table import LimitTable
from core.errors import QuotaExceeded
from router.leases import Leases
from router.limits import Orders, Report
from router.quotas import CallCost, Quotas
from router.tenants import Tenant
from tests.simulation.virtual_time import LoopClock, VirtualLoop, run_virtually
from tests.unit.router.replicas import PERIOD_S, new_tenant

LIMIT, NUM_ROUTERS = 120, 2
SECONDS = 120.0
LATE_S = 0.05


class DistantOwner:
    """The real table, a random time away (mean `latency_s`, each way)."""

    def __init__(self, clock: LoopClock, chance: random.Random, latency_s: float) -> None:
        self._table = LimitTable(clock)
        self._chance = chance
        self._latency_s = latency_s

    async def exchange(self, report: Report) -> Orders:
        await asyncio.sleep(self._chance.expovariate(1 / self._latency_s))
        orders = self._table.exchange(report)
        await asyncio.sleep(self._chance.expovariate(1 / self._latency_s))
        return orders


@dataclass(slots=True)
class Crowd:
    """Clients of one tenant, each of which comes once more, when told. `way_s`: mean time that a call takes
    from the client to a router, and its refusal back.
    """

    clock: LoopClock
    routers: list[Quotas]
    tenant: Tenant
    chance: random.Random
    way_s: float
    let_in: list[float] = field(default_factory=list)
    num_returns: int = 0
    num_returns_let_in: int = 0

    async def come(self, rate: float, seconds: float) -> None:
        """`rate` new ones a second, for so long; returns when the last has come back."""
        start = self.clock.now()
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, start + number / rate - self.clock.now()))
                group.create_task(self._client(number + 1))

    async def _client(self, number: int) -> None:
        told_s = await self._call(number)
        if told_s is None:
            return
        await asyncio.sleep(told_s + LATE_S)
        is_let_in = await self._call(number) is None
        self.num_returns += 1
        self.num_returns_let_in += is_let_in

    async def _call(self, number: int) -> float | None:
        """None, or the seconds after which to come back."""
        await asyncio.sleep(self.chance.expovariate(1 / self.way_s))
        try:
            await self.chance.choice(self.routers).admit(self.tenant, CallCost(1, 0, number))
        except QuotaExceeded as error:
            await asyncio.sleep(self.chance.expovariate(1 / self.way_s))
            return float(str(error.details["retry_after_s"]))
        self.let_in.append(self.clock.now())
        return None

    def most_in_a_minute(self) -> int:
        return max(sum(at <= other < at + 60.0 for other in self.let_in) for at in self.let_in)


async def over_limit(loop: VirtualLoop, way_s: float, latency_s: float, seed: int) -> Crowd:
    """Half as many again as the limit lets in, for three minutes, to any router."""
    clock, chance = LoopClock(loop), random.Random(seed)
    owner = DistantOwner(clock, chance, latency_s)
    all_leases = [Leases(owner, clock, PERIOD_S, NUM_ROUTERS) for _ in range(NUM_ROUTERS)]
    keeping = [asyncio.create_task(leases.keep()) for leases in all_leases]
    await asyncio.sleep(6.0)  # the owner has heard of all
    routers = [Quotas(leases, clock) for leases in all_leases]
    crowd = Crowd(clock, routers, new_tenant(max_requests_per_minute=LIMIT), chance, way_s)
    await crowd.come(1.5 * LIMIT / 60, SECONDS)
    for task in keeping:
        task.cancel()
    return crowd


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("way_s", "latency_s"), [(0.01, 0.005), (0.1, 0.02), (0.3, 0.05)])
def test_nine_in_ten_who_come_back_when_told_are_let_in_by_any_router(
    way_s: float, latency_s: float, seed: int
) -> None:
    loop = VirtualLoop()
    crowd = run_virtually(over_limit(loop, way_s, latency_s, seed), loop)
    assert crowd.num_returns > 60
    share = crowd.num_returns_let_in / crowd.num_returns
    assert share >= 0.95, f"{crowd.num_returns_let_in} of {crowd.num_returns}"
    assert crowd.most_in_a_minute() <= LIMIT
    assert len(crowd.let_in) >= 0.95 * LIMIT * SECONDS / 60


def test_a_slow_first_answer_of_the_owner_does_not_send_a_tenant_away_for_a_minute() -> None:
    loop = VirtualLoop()
    crowd = run_virtually(over_limit(loop, 0.01, 0.5, seed=2), loop)
    first = [at for at in crowd.let_in if at < crowd.let_in[0] + 30.0]
    assert crowd.let_in[0] < 1020.0
    assert len(first) > 0.4 * LIMIT, f"{len(first)} in the first half minute"
