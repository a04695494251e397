"""What becomes of a call that waits for its tenant's tokens while the world changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.errors import QuotaExceeded
from core.ids import TenantId
from router.leases import Leases
from router.limits import Order, Orders, Report
from router.quotas import CallCost, Quotas
from router.tenants import Tenant
from router.tenants_config import TenantLimits
from tests.doubles import FakeClock

SIZE = 100
TENANT = Tenant(TenantId("a"), TenantLimits("a", max_concurrent_tokens=SIZE), "a")
COST = CallCost(num_prompt_tokens=60, max_output_tokens=40, call=1)


class Slow:
    """An owner that grants once, and then says that there is more, but not when."""

    def __init__(self) -> None:
        self.has_granted = False

    async def exchange(self, report: Report) -> Orders:
        num = 0 if self.has_granted else SIZE
        self.has_granted = bool(report.holdings)
        return Orders(tuple(Order(item.name, num, 0, SIZE) for item in report.holdings), 2, is_settled=True)


def _new() -> tuple[Quotas, asyncio.Task[None]]:
    """And its rounds with the owner."""
    leases = Leases(Slow(), FakeClock(), period_s=0.001, num_replicas=2)
    return Quotas(leases, FakeClock()), asyncio.create_task(leases.keep())


async def test_tokens_that_come_back_as_the_wait_ends_let_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas, rounds = _new()
    first = await quotas.admit(TENANT, COST)
    monkeypatch.setattr("router.quotas._REFILL_S", 0.0)
    asyncio.get_running_loop().call_soon(first.settle, 1, True, 1.0)
    await quotas.admit(TENANT, COST)
    with pytest.raises(QuotaExceeded) as refused:
        await quotas.admit(TENANT, COST)
    assert refused.value.details["limit"] == "concurrent_tokens"
    rounds.cancel()


async def test_a_limit_that_is_lifted_during_the_wait_lets_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas, rounds = _new()
    await quotas.admit(TENANT, COST)
    monkeypatch.setattr("router.quotas._REFILL_S", 0.0)
    free = replace(TENANT, limits=TenantLimits("a"))
    asyncio.get_running_loop().call_soon(quotas.leases_of, free)
    await quotas.admit(TENANT, COST)
    rounds.cancel()
