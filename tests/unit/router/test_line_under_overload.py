"""A line before workers that share one machine, offered more than they can do, in virtual time: nobody is let
in only to be cut off, and what the machine can do is used.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from core.clock import Clock, Deadline
from core.errors import DeadlineExceeded, Overloaded
from core.ids import TenantId
from router.line import Line
from router.promises import Promises
from router.tenants import Tenant
from router.tenants_config import TenantLimits
from tests.simulation.virtual_time import LoopClock, VirtualLoop, run_virtually

TENANT = Tenant(TenantId("a"), TenantLimits("a"), "a")
TIMEOUT_S = 8.0
NUM_AT_FULL_SPEED = 4
TICK_S = 0.02
COSTS = (190.0, 1650.0)


def seconds_alone(cost: float) -> float:
    """Most of it is the answer, which is as long for all."""
    return 0.85 + 0.0002 * cost


class Machine:
    """Runs all at once; beyond `NUM_AT_FULL_SPEED` they slow each other down."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Event, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            done = TICK_S * min(1.0, NUM_AT_FULL_SPEED / max(1, len(self._left)))
            for ended in list(self._left):
                self._left[ended] -= done
                if self._left[ended] <= 0.0:
                    del self._left[ended]
                    ended.set()

    async def serve(self, work_s: float) -> None:
        ended = asyncio.Event()
        self._left[ended] = work_s
        try:
            await ended.wait()
        finally:
            self._left.pop(ended, None)


class Load:
    """Calls that come by chance, of small and large prompts; `ends` counts what became of those of the last
    stretch.
    """

    def __init__(self, clock: Clock, num_places: int, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self._clock = clock
        self._chance = random.Random(seed)
        self._line = Line(1024, 10.0, clock, lambda: num_places, lambda *_: None, Promises(clock))
        self._machine = Machine()
        self._num_sent = 0

    async def offer(self, *stretches: tuple[float, float]) -> None:
        """Each so many calls a second, for so many seconds."""
        machine = asyncio.create_task(self._machine.run())
        calls = []
        for rate, duration_s in stretches:
            self.ends = Counter()
            end = self._clock.now() + duration_s
            while self._clock.now() < end:
                await asyncio.sleep(self._chance.expovariate(rate))
                self._num_sent += 1
                calls.append(asyncio.create_task(self._call(self._num_sent, self.ends)))
        await asyncio.gather(*calls)
        machine.cancel()

    async def _call(self, number: int, ends: Counter[str]) -> None:
        cost = self._chance.choice(COSTS)
        deadline = Deadline.after(TIMEOUT_S, self._clock)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                self._line.check([cost], 5, number, deadline)
                async with self._line.place(TENANT, 5, cost, deadline):
                    await self._machine.serve(seconds_alone(cost))
        except Overloaded:
            ends["refused"] += 1
        except (DeadlineExceeded, TimeoutError):
            ends["late"] += 1
        else:
            ends["answered"] += 1


CAPACITY = NUM_AT_FULL_SPEED / (sum(map(seconds_alone, COSTS)) / len(COSTS))
WARM = (0.4 * NUM_AT_FULL_SPEED, 15.0)


@pytest.mark.parametrize("excess", [2.0, 4.0])
def test_nearly_all_that_are_let_in_are_answered_in_time(excess: float) -> None:
    loop = VirtualLoop()
    load = Load(LoopClock(loop), num_places=9, seed=3)
    run_virtually(load.offer(WARM, (excess * CAPACITY, 60.0)), loop)
    ends = load.ends
    assert ends["late"] <= 0.03 * (ends["late"] + ends["answered"]), ends
    assert ends["answered"] >= 0.95 * CAPACITY * 60.0, ends


@pytest.mark.parametrize("num_places", [40, 200])
@pytest.mark.parametrize("excess", [2.0, 4.0])
def test_more_places_than_can_be_served_in_time_are_not_all_used(excess: float, num_places: int) -> None:
    """The first wave shows how many that is."""
    loop = VirtualLoop()
    load = Load(LoopClock(loop), num_places, seed=3)
    run_virtually(load.offer(WARM, (excess * CAPACITY, 4 * TIMEOUT_S), (excess * CAPACITY, 60.0)), loop)
    ends = load.ends
    assert ends["late"] <= 0.05 * (ends["late"] + ends["answered"]), ends
    assert ends["answered"] >= 0.95 * CAPACITY * 60.0, ends


def test_as_many_run_as_ever_once_they_are_served_in_time_again() -> None:
    loop = VirtualLoop()
    load = Load(LoopClock(loop), num_places=40, seed=3)
    calm = (0.8 * CAPACITY, 60.0)
    run_virtually(load.offer(WARM, (4 * CAPACITY, 30.0), calm, calm), loop)
    assert load.ends["answered"] >= 0.98 * sum(load.ends.values()), load.ends
