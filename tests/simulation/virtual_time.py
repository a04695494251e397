"""VirtualLoop: an asyncio event loop whose time passes only when nobody has anything to do.

Then it jumps to the next timer, so that a minute of timeouts takes milliseconds, and the order of everything
depends on the timers alone. A loop in which nothing can ever happen again raises Stuck instead of waiting.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_START_S = 1000.0


class Stuck(RuntimeError):
    """No task can run, and no timer is set."""


class _Jumping(selectors.SelectSelector):
    """Takes no real time: what would be waited for is added to the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = _START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no task can run and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs on one thread; nothing outside it can wake it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """There is no other thread: it is done at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it gets it
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Whoever calls is on this thread: there is no select to interrupt."""


class LoopClock:
    """The clock of a VirtualLoop, for those who are given one."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()


def run_virtually(work: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run to the end, then cancel what is left and close the loop."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
