"""SiteSteps: a worker's step thread in virtual time.

The order of `engine.step_thread.StepThread`: waiting commands, tick, step. While a step runs, commands wait
for its end. A step is worked out in one go when it begins; whoever else looks at the worker does so by a
command or a message, and so not before the step has ended. Where other workers slow a step while it runs, its
turn waits for the end in a greenlet. Steps that would only repeat the last one are taken at once, as many as
fit before the next command or tick. One thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from greenlet import greenlet

from cluster.simulator.events import Events, SiteClock

TICK_S = 0.5
"""Ticks look at deadlines and silences, which are seconds: not before each step, as on a real step thread."""


class Stepped(Protocol):
    """What there is to do on the step thread."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> bool: ...

    def tick(self) -> None: ...

    def tell_load(self) -> None:
        """Commands have run; `clock` is when."""
        ...

    def turned(self) -> None:
        """A step has run; `clock` is where it ended."""
        ...

    def following(self, limit_at: float) -> list[float]:
        """When steps would end that only repeat the last one and begin before `limit_at`."""
        ...

    def repeat(self, num_steps: int) -> None:
        """Take the first of those."""
        ...


class SiteSteps:
    """One per worker. `is_waiting`: a step may wait for its end, see `cluster.simulator.sharing`."""

    def __init__(self, events: Events, clock: SiteClock, work: Stepped, is_waiting: bool = False) -> None:
        self._events = events
        self._clock = clock
        self._work = work
        self._is_waiting = is_waiting
        self._commands: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awake = False
        self._turn_at = 0.0
        self._following: list[float] = []
        self._tick_at = 0.0
        self._is_tick_due = False

    def post(self, when: float, command: Callable[..., object], *arguments: Any) -> None:
        """A message that comes in at `when`: its command runs then, or after the step that runs."""
        self._events.at(when, self._arrive, command, arguments)

    def _arrive(self, command: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._commands.append((command, arguments))
        if not self._is_awake:
            self._turn()
        elif self._following:
            self._cut()

    def _cut(self) -> None:
        """Of the steps ahead, those count that have begun."""
        now = self._events.now()
        num_begun = bisect_left(self._following, now) + 1 if now > self._clock.at else 0
        if num_begun < len(self._following):
            del self._following[num_begun:]
            self._turn_after()

    def _turn_after(self) -> None:
        self._turn_at = self._following[-1] if self._following else self._clock.at
        self._events.at(self._turn_at, self._turn_if_due, self._turn_at)

    def _turn_if_due(self, when: float) -> None:
        if when != self._turn_at or not self._is_awake:
            return
        if self._following:
            self._work.repeat(len(self._following))
            self._following = []
        self._turn()

    def _turn(self) -> None:
        self._is_awake = True
        if self._is_waiting:
            greenlet(self._take_turn).switch()
        else:
            self._take_turn()

    def _take_turn(self) -> None:
        clock, commands = self._clock, self._commands
        clock.at = now = self._events.now()
        while commands:
            command, arguments = commands.popleft()
            command(*arguments)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._work.tick()
        self._work.tell_load()
        self._is_awake = self._work.step()
        self._work.turned()
        if self._is_awake:
            self._following = self._work.following(self._tick_at)
            self._turn_after()
        elif not self._is_tick_due and self._work.has_work:
            self._is_tick_due = True
            self._events.after(TICK_S, self._wake)

    def _wake(self) -> None:
        self._is_tick_due = False
        if not self._is_awake:
            self._turn()
