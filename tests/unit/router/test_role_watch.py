"""Nobody decodes any more: the router asks until somebody steps in, and is ready meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from core.errors import StaleEpoch
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleChange, RoleOrder
from router.role_watch import RoleWatch
from router.worker_entry import WorkerState
from tests.doubles import settle
from tests.unit.router.scripted import Fleet, ScriptedWorker


@dataclass
class ScriptedDesk:
    """Sends `stand_in` to the empty pool; `is_away` makes it unreachable."""

    fleet: Fleet
    stand_in: ScriptedWorker | None = None
    is_away: bool = False
    is_refusing: bool = False
    is_broken: bool = False
    hold: asyncio.Event | None = None
    asked: list[tuple[Role, set[str]]] = field(default_factory=list)
    followed: list[RoleOrder] = field(default_factory=list)

    async def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        if self.is_away:
            raise ConnectionError("away")
        if self.is_broken:
            raise RuntimeError("a fault of its own")
        self.asked.append((role, {str(ref.worker_id) for ref in unusable}))
        return None if self.stand_in is None else RoleOrder(self.stand_in.ref, role, RoleCause.EMPTY_POOL)

    async def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        raise AssertionError("nobody orders here")

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        self.followed.append(order)
        if self.hold is not None:
            await self.hold.wait()
        if self.is_refusing:
            raise StaleEpoch("it has done so already")
        assert self.stand_in is not None
        self.stand_in.end_watch()
        self.stand_in.die()
        ref = replace(order.worker, role=order.role, epoch=Epoch(order.worker.epoch + 100))
        again = ScriptedWorker(order.role, str(ref.worker_id), ref.epoch)
        self.fleet.join(again)
        return RoleChange(again.ref, 0.0, 0.0)


@asynccontextmanager
async def watching(fleet: Fleet, desk: ScriptedDesk | None) -> AsyncIterator[RoleWatch]:
    watch = RoleWatch(fleet.table, desk, fleet.time, fleet.time.sleep)
    task = asyncio.create_task(watch.run())
    await settle()
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pair() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


async def test_when_the_last_decode_worker_dies_the_chosen_one_is_told_and_used_at_once() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill)
        async with watching(fleet, desk) as watch:
            assert not desk.asked
            decode.die()
            await settle()
            assert desk.asked == [(Role.DECODE, {"d"})]
            assert [order.worker for order in desk.followed] == [prefill.ref]
            assert [entry.ref.worker_id for entry in fleet.table.usable(Role.DECODE)] == ["p"]
            assert not watch.is_filling


async def test_it_is_about_to_be_filled_also_while_the_stand_in_has_neither_role() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill, hold=asyncio.Event())
        async with watching(fleet, desk) as watch:
            decode.die()
            prefill.die()
            await settle()
            assert not watch.is_filling, "nobody is left"
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill, hold=asyncio.Event())
        async with watching(fleet, desk) as watch:
            decode.die()
            await settle()
            assert desk.followed
            prefill.die()
            await settle()
            assert watch.is_filling
            fleet.time.advance(5.5)
            assert not watch.is_filling, "it has had its time"


async def test_a_stand_in_that_sleeps_like_the_others_fills_nothing() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill, hold=asyncio.Event())
        async with watching(fleet, desk) as watch:
            prefill.is_silent = True
            await fleet.pass_by(6.0)
            decode.die()
            await settle()
            assert desk.followed
            assert watch.is_filling
            await fleet.pass_by(3.0)
            assert WorkerState.SUSPECT in [entry.state for entry in fleet.table.entries()]
            assert not watch.is_filling


async def test_a_desk_that_is_away_or_a_worker_that_refuses_is_asked_again() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill, is_away=True)
        async with watching(fleet, desk) as watch:
            decode.die()
            await settle()
            assert watch.is_filling
            desk.is_away, desk.is_refusing = False, True
            await fleet.pass_by(0.3)
            assert desk.followed
            assert not fleet.table.usable(Role.DECODE)
            desk.is_refusing = False
            await fleet.pass_by(0.3)
            assert fleet.table.usable(Role.DECODE)


async def test_a_pool_that_was_never_there_counts_as_starting() -> None:
    prefill, _ = pair()
    async with Fleet(prefill) as fleet, watching(fleet, ScriptedDesk(fleet)) as watch:
        assert not watch.is_filling


async def test_without_a_desk_nothing_is_filled() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet, watching(fleet, None) as watch:
        decode.die()
        await settle()
        assert not watch.is_filling


async def test_a_desk_with_a_fault_of_its_own_is_asked_again_too() -> None:
    prefill, decode = pair()
    async with Fleet(prefill, decode) as fleet:
        desk = ScriptedDesk(fleet, prefill, is_broken=True)
        async with watching(fleet, desk):
            decode.die()
            await settle()
            assert not desk.asked
            desk.is_broken = False
            await fleet.pass_by(0.3)
            assert fleet.table.usable(Role.DECODE)
