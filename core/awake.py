"""Awake: how much of the time that passed this process ran.

A process that is stopped (SIGSTOP, a paused container or virtual machine) finds its timers over when it goes
on, though none of its threads had any of that time. Whoever asks whether something in this process gets on
counts only time in which it ran. What was promised to others, deadlines and silences, stays on the clock.

Owns the account of stops; somebody else looks each PERIOD_S. Any thread may ask, one looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.clock import Clock

PERIOD_S = 0.5
_MAX_STOPS = 100  # remembered; a bound that began before the oldest of them counts a little too much


@dataclass(frozen=True, slots=True)
class _Account:
    """`looked_at` is None while nobody looks: no stop is noticed. `stops`: (noticed at, seconds lost)."""

    looked_at: float | None = None
    stops: tuple[tuple[float, float], ...] = ()


class Awake:
    """A look that comes later than it should says that nothing ran meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._account = _Account()  # replaced as a whole: others read it at any time

    def look(self) -> None:
        """To be called each PERIOD_S by something that is late only if the process does not run."""
        account, now = self._account, self._clock.now()
        stops = account.stops
        if (lost_s := _unnoticed_s(account, now)) > 0:
            stops = (*stops, (now, lost_s))[-_MAX_STOPS:]
        self._account = _Account(now, stops)

    def rest(self) -> None:
        """Nobody looks from now on."""
        self._account = _Account(None, self._account.stops)

    def lost_s(self, since: float) -> float:
        """Seconds since that moment of the clock in which the process did not run."""
        account = self._account  # before the time: what is lost between both is noticed
        return _lost_s(account, self._clock.now(), since)

    def elapsed_s(self, since: float) -> float:
        """Seconds since that moment of the clock in which the process ran."""
        account = self._account
        now = self._clock.now()
        return max(0.0, now - since - _lost_s(account, now, since))

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """`asyncio.timeout`, of seconds in which the process ran."""
        loop = asyncio.get_running_loop()
        began_at, ends_at = self._clock.now(), loop.time() + seconds
        async with asyncio.timeout(None) as bound:
            timer = loop.call_later(seconds, lambda: look())

            def look() -> None:
                nonlocal timer
                now = loop.time()
                left_s = ends_at + self.lost_s(began_at) - now
                if left_s > 0:
                    timer = loop.call_later(left_s, look)
                else:
                    bound.reschedule(now)

            try:
                yield
            finally:
                timer.cancel()


def _lost_s(account: _Account, now: float, since: float) -> float:
    stops = (*account.stops, (now, _unnoticed_s(account, now)))
    return sum(min(lost_s, noticed_at - since) for noticed_at, lost_s in stops if noticed_at > since)


def _unnoticed_s(account: _Account, now: float) -> float:
    """What the next look would find lost. A look that is a little late was kept waiting, not stopped."""
    if account.looked_at is None or (passed_s := now - account.looked_at) <= 2 * PERIOD_S:
        return 0.0
    return passed_s - PERIOD_S
