"""Stand-ins for what tests must control: time.

Everything else in the tests is the real part.
"""

from __future__ import annotations

import asyncio


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class FakeTime(FakeClock):
    """A clock with sleepers: whoever sleeps wakes when the clock is moved past its moment."""

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__(now)
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        wake = asyncio.get_running_loop().create_future()
        entry = (self.now() + seconds, wake)
        self._sleepers.append(entry)
        try:
            await wake
        finally:
            self._sleepers.remove(entry)

    async def pass_by(self, seconds: float) -> None:
        """Move on, waking sleepers in order and letting everything that can run do so in between."""
        end = self.now() + seconds
        await settle()
        while due := [entry for entry in self._sleepers if entry[0] <= end and not entry[1].done()]:
            at, wake = min(due, key=lambda entry: entry[0])
            self.advance(max(0.0, at - self.now()))
            wake.set_result(None)
            await settle()
        self.advance(end - self.now())
        await settle()


class CreepingTime(FakeTime):
    """A clock of which no two readings are equal, and whose sleepers wake `early_s` before their moment."""

    TICK_S = 1e-6

    def __init__(self, early_s: float) -> None:
        super().__init__()
        self._early_s = early_s

    def now(self) -> float:
        self.advance(self.TICK_S)
        return super().now()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(max(0.0, seconds - self._early_s))


async def settle(rounds: int = 50) -> None:
    """Let all tasks run until they wait for something from outside."""
    for _ in range(rounds):
        await asyncio.sleep(0)
