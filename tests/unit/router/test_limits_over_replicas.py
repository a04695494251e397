"""The limits hold over several routers, wherever the calls go, and when the owner of the limits is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from core.errors import QuotaExceeded
from router.leases import Leases
from router.limits import Orders, Report, SoleOwner
from router.quotas import Grant
from tests.doubles import FakeClock
from tests.unit.router.replicas import Service, new_tenant

MINUTE = 60.0


async def flood(
    service: Service, seconds: float, per_s: int, size: int, to: Callable[[float], int], **limits: int
) -> None:
    """`per_s` calls of `size` prompt tokens a second; nobody heeds Retry-After."""
    tenant = new_tenant(**limits)
    for step in range(int(seconds)):
        for _ in range(per_s):
            service.send(to(step), tenant, size)
        await service.pass_by(1.0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("skew", [0.5, 0.9, 1.0])
async def test_two_replicas_let_through_what_one_would(skew: float, seed: int) -> None:
    service, chance = Service(), random.Random(seed)
    await service.pass_by(6.0)
    start = service.clock.now()
    limit = 6000
    await flood(
        service,
        3 * MINUTE,
        per_s=4,
        size=60,
        to=lambda step: int((chance.random() < skew) != (step // 40 % 2 == 0)),
        max_prompt_tokens_per_minute=limit,
    )
    assert service.most_in_a_minute() <= limit
    whole = service.let_in(start, start + 3 * MINUTE)
    assert whole >= 0.98 * 3 * limit, f"{whole / (3 * limit):.3f} of the limit was let through"
    assert service.refusals


async def test_a_burst_gets_the_whole_limit_wherever_it_goes() -> None:
    for shares in ((20, 20), (35, 5), (40, 0)):
        service = Service()
        await service.pass_by(6.0)
        tenant = new_tenant(max_requests_per_minute=20)
        for index, num in enumerate(shares):
            for _ in range(num):
                service.send(index, tenant, 1)
        await service.pass_by(2.0)
        assert len(service.log) == 20, shares
        assert len(service.refusals) == 20


async def test_without_an_owner_each_replica_keeps_an_equal_part() -> None:
    service = Service()
    await service.pass_by(6.0)
    service.owner.is_away = True
    await service.pass_by(4.0)
    start = service.clock.now()
    await flood(service, 2 * MINUTE, 4, 60, lambda step: step % 2, max_prompt_tokens_per_minute=6000)
    assert service.most_in_a_minute() <= 6000
    assert service.let_in(start, start + 2 * MINUTE) >= 0.9 * 2 * 6000


async def test_a_reborn_owner_learns_who_holds_what_before_it_grants_again() -> None:
    service = Service()
    await service.pass_by(6.0)
    await flood(service, 30, 4, 60, lambda step: 0, max_prompt_tokens_per_minute=6000)
    service.owner.be_reborn()
    await flood(service, 60, 4, 60, lambda step: step % 2, max_prompt_tokens_per_minute=6000)
    # what the first one has out is more than its part: the second one's part may come on top, once
    assert service.most_in_a_minute() <= 1.5 * 6000
    settled = service.clock.now()
    await flood(service, 2 * MINUTE, 4, 60, lambda step: step % 2, max_prompt_tokens_per_minute=6000)
    later = [at for at, _ in service.log if at >= settled + MINUTE]
    assert max(service.let_in(at, at + MINUTE) for at in later) <= 6000


async def test_a_dead_replicas_part_goes_to_the_others_once_its_tokens_are_back() -> None:
    service = Service()
    await service.pass_by(6.0)
    await flood(service, 10, 10, 100, lambda step: 0, max_prompt_tokens_per_minute=6000)
    service.replicas[0].is_dead = True
    await flood(service, 3 * MINUTE, 10, 100, lambda step: 1, max_prompt_tokens_per_minute=6000)
    assert service.most_in_a_minute() <= 6000
    end = service.clock.now()
    assert service.let_in(end - MINUTE, end) >= 0.98 * 6000


async def test_what_was_reserved_and_not_generated_comes_back() -> None:
    service = Service(1)
    await service.pass_by(6.0)
    tenant = new_tenant(max_output_tokens_per_minute=100, max_concurrent_tokens=200)
    first = service.send(0, tenant, 10, 90)
    await service.pass_by(1.0)
    grant = first.result()
    assert isinstance(grant, Grant)
    second = service.send(0, tenant, 10, 90)
    await service.pass_by(1.0)
    assert isinstance(second.result(), QuotaExceeded)
    grant.settle(5, True, service.clock.now())
    third = service.send(0, tenant, 10, 90)
    await service.pass_by(1.0)
    grant = third.result()
    assert isinstance(grant, Grant)
    grant.settle(0, False, service.clock.now())
    assert service.replicas[0].leases.all()
    for lease in service.replicas[0].leases.all():
        out = lease.bucket.held - lease.bucket.num_free(service.clock.now())
        assert out == (5 if lease.size == 100 else 0)


@pytest.mark.parametrize(("before", "after"), [(60, 20), (20, 60)])
async def test_a_changed_limit_holds_once_what_was_taken_before_is_back(before: int, after: int) -> None:
    service = Service()
    await service.pass_by(6.0)
    for limit in (before, after):
        tenant = new_tenant(max_requests_per_minute=limit)
        for step in range(125):
            for _ in range(4):
                service.send(step % 2, tenant, 1)
            await service.pass_by(1.0)
    now = service.clock.now()
    assert 0.9 * after <= service.let_in(now - MINUTE, now) <= after
    for replica in service.replicas:
        assert all(lease.size == after for lease in replica.leases.all())


@pytest.mark.parametrize(("num_replicas", "is_moving"), [(1, False), (2, False), (2, True)])
async def test_at_least_nine_in_ten_who_come_back_when_they_were_told_are_let_in(
    num_replicas: int, is_moving: bool
) -> None:
    """`is_moving`: whoever comes back may come to any router, up to a second late."""
    service, chance = Service(num_replicas), random.Random(3)
    await service.pass_by(6.0)
    tenant = new_tenant(max_requests_per_minute=60)
    due: list[tuple[float, int, int]] = []
    came = let_in = 0
    for step in range(240):
        now = service.clock.now()
        calls = [(call, index) for at, call, index in due if at <= now]
        due = [item for item in due if item[0] > now]
        tasks = [(call, index, service.send(index, tenant, 1, 0, call)) for call, index in calls]
        fresh = []
        if step < 180 and step % 2 == 0:  # 1.5 times the limit
            for number in range(3):
                index = chance.randrange(num_replicas)
                fresh.append(
                    (step * 10 + number, index, service.send(index, tenant, 1, 0, step * 10 + number))
                )
        await service.pass_by(1.0)
        await asyncio.gather(*(task for _, _, task in tasks + fresh))
        came += len(tasks)
        let_in += sum(isinstance(task.result(), Grant) for _, _, task in tasks)
        for call, index, task in fresh:
            if isinstance(task.result(), QuotaExceeded):
                to = chance.randrange(num_replicas) if is_moving else index
                due.append((service.told[call], call, to))
    assert came > 30
    assert let_in >= 0.9 * came, f"{let_in} of {came}"
    assert service.most_in_a_minute() <= 60
    assert len(service.log) >= 0.9 * 60 * 4, f"{len(service.log)} calls were let in in four minutes"


async def test_rounds_with_the_owner_go_on_after_one_that_failed_in_an_unknown_way() -> None:
    class Broken(SoleOwner):
        def __init__(self) -> None:
            self.num_rounds = 0
            self.is_well = asyncio.Event()

        async def exchange(self, report: Report) -> Orders:
            self.num_rounds += 1
            if self.num_rounds == 1:
                raise RuntimeError("a fault of its own")
            self.is_well.set()
            return await super().exchange(report)

    owner = Broken()
    rounds = asyncio.create_task(Leases(owner, FakeClock(), period_s=0.001).keep())
    await owner.is_well.wait()
    rounds.cancel()
    await asyncio.gather(rounds, return_exceptions=True)
