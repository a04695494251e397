"""Time in which the process was stopped counts for nobody who asks whether it gets on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from core.awake import PERIOD_S, Awake
from tests.doubles import FakeClock
from tests.simulation.virtual_time import LoopClock, VirtualLoop, run_virtually


class Watched:
    """A process on a fake clock that looks as it should while it `runs`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.awake = Awake(self.clock)
        self.awake.look()

    def now(self) -> float:
        return self.clock.now()

    def runs(self, seconds: float) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            self.clock.advance(PERIOD_S)
            self.awake.look()

    def is_stopped(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
def process() -> Watched:
    return Watched()


def test_all_time_counts_while_the_process_runs(process: Watched) -> None:
    began_at = process.now()
    process.runs(90.0)
    assert process.awake.elapsed_s(began_at) == pytest.approx(90.0)
    assert process.awake.lost_s(began_at) == 0.0


def test_a_stop_does_not_count_from_its_first_moment_on_whether_it_is_noticed_yet_or_not(
    process: Watched,
) -> None:
    began_at = process.now()
    process.runs(2.0)
    process.is_stopped(60.0)
    assert process.awake.elapsed_s(began_at) == pytest.approx(2.0 + PERIOD_S)
    process.awake.look()
    assert process.awake.elapsed_s(began_at) == pytest.approx(2.0 + PERIOD_S)
    process.runs(3.0)
    assert process.awake.elapsed_s(began_at) == pytest.approx(5.0 + PERIOD_S)


def test_each_of_several_stops_is_left_out(process: Watched) -> None:
    began_at = process.now()
    for _ in range(5):
        process.is_stopped(6.0)
        process.awake.look()
        process.runs(1.0)
    assert process.awake.elapsed_s(began_at) == pytest.approx(5 * (1.0 + PERIOD_S))


def test_what_begins_after_a_stop_owes_it_nothing(process: Watched) -> None:
    process.is_stopped(60.0)
    woken_at = process.now()
    process.clock.advance(0.1)
    process.awake.look()
    process.runs(4.0)
    assert process.awake.elapsed_s(woken_at) == pytest.approx(4.0)
    process.runs(60.0)
    assert process.awake.elapsed_s(process.now() - 10.0) == pytest.approx(10.0)


def test_a_look_that_had_to_wait_for_its_turn_is_no_stop(process: Watched) -> None:
    began_at = process.now()
    for _ in range(10):
        process.clock.advance(2 * PERIOD_S)
        process.awake.look()
    assert process.awake.lost_s(began_at) == 0.0


def test_where_nobody_looks_no_stop_is_guessed(process: Watched) -> None:
    process.awake.rest()
    began_at = process.now()
    process.is_stopped(60.0)
    assert process.awake.elapsed_s(began_at) == 60.0
    assert Awake(process.clock).elapsed_s(began_at) == 60.0


# ------------------------------------------------------------ bounds, in virtual time


Bounded = Callable[[Awake, VirtualLoop], Awaitable[float]]


def played(bounded: Bounded, stopped_at: float, stopped_s: float) -> float:
    """What `bounded` gives in a process that is stopped once: then time passes at once, and all timers of
    that time are over.
    """
    loop = VirtualLoop()
    awake = Awake(LoopClock(loop))

    async def watch() -> None:
        while True:
            awake.look()
            await asyncio.sleep(PERIOD_S)

    async def stop() -> None:
        await asyncio.sleep(stopped_at)
        loop._jumping.now += stopped_s

    async def play() -> float:
        others = [asyncio.create_task(watch()), asyncio.create_task(stop())]
        await asyncio.sleep(0)
        result = await bounded(awake, loop)
        for task in others:
            task.cancel()
        return result

    return run_virtually(play(), loop)


async def seconds_until_timeout(awake: Awake, loop: VirtualLoop) -> float:
    began_at = loop.time()
    with pytest.raises(TimeoutError):
        async with awake.timeout(5.0):
            await asyncio.Event().wait()
    return loop.time() - began_at


def test_a_bound_is_over_when_the_process_had_that_time() -> None:
    assert played(seconds_until_timeout, stopped_at=100.0, stopped_s=0.0) == pytest.approx(5.0)
    for stopped_at in (0.0, 0.3, 1.0, 4.9):
        took_s = played(seconds_until_timeout, stopped_at, stopped_s=30.0)
        assert 35.0 - 2 * PERIOD_S <= took_s <= 35.0 + 2 * PERIOD_S, stopped_at


def test_what_is_done_in_time_after_a_stop_is_in_time() -> None:
    async def work(awake: Awake, loop: VirtualLoop) -> float:
        async with awake.timeout(5.0):
            await asyncio.sleep(8.0)  # 6 of them stopped
        return loop.time()

    assert played(work, stopped_at=1.0, stopped_s=6.0)


def test_a_caller_that_goes_away_is_no_timeout() -> None:
    async def leave(awake: Awake, loop: VirtualLoop) -> float:
        async def wait() -> None:
            async with awake.timeout(5.0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return loop.time()

    assert played(leave, stopped_at=100.0, stopped_s=0.0)
