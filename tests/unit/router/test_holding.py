"""Who is held back while all workers are full looks again when somebody leaves: in order, a few at a time."""

from __future__ import annotations

import asyncio
import random

from router.placer import MAX_WOKEN, Placer
from tests.doubles import settle
from tests.unit.router.pipeline_fleet import decode_worker
from tests.unit.router.scripted import Fleet

NUM_HELD = 2 * MAX_WOKEN + 3


async def test_each_end_wakes_the_next_ones_and_whoever_is_held_on_comes_last_again() -> None:
    async with Fleet(decode_worker()) as fleet:
        placer = Placer(fleet.config, fleet.table, fleet.metrics, fleet.time, random.Random(1))
        woken: list[int] = []

        async def hold_twice(number: int) -> None:
            for _ in range(2):
                await placer.hold(100.0)
                woken.append(number)

        tasks = [asyncio.create_task(hold_twice(number)) for number in range(NUM_HELD)]
        await settle()
        order = [*range(NUM_HELD), *range(NUM_HELD)]
        for num_ends in range(1, 6):
            placer.freed()
            await settle()
            assert woken == order[: num_ends * MAX_WOKEN]
        await asyncio.gather(*tasks)
        placer.freed()  # nobody is held any more


async def test_whoever_gives_up_takes_no_turn_from_others_and_time_wakes_all() -> None:
    async with Fleet(decode_worker()) as fleet:
        placer = Placer(fleet.config, fleet.table, fleet.metrics, fleet.time, random.Random(1))
        tasks = [asyncio.create_task(placer.hold(5.0)) for _ in range(MAX_WOKEN + 2)]
        await settle()
        for task in tasks[:2]:
            task.cancel()
        await settle()
        placer.freed()
        await settle()
        assert all(task.done() for task in tasks)
        late = [asyncio.create_task(placer.hold(5.0)) for _ in range(NUM_HELD)]
        await settle()
        await fleet.pass_by(5.1)
        assert all(task.done() for task in late)
