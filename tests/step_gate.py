"""StepGate: a gate before the steps of a real runner, so that a test can look at a moment that would pass by.

Owns when a step may begin; the steps are the real ones. A step thread that stands at the closed gate has
applied all steps before and nothing of the next, and runs no command until the gate lets a step through.
`hold`, `release` and the coroutines are for the test's loop; the rest runs on the step thread.
"""

from __future__ import annotations

import asyncio
import math
import threading

from engine.runner import ModelRunner
from engine.running_step import RunningStep
from engine.step import StepPlan
from tests.doubles import settle

WAIT_S = 30.0
"""Far longer than any step takes: it ends a test that waits for a step which will never come."""


class StepGate:
    """Open until `hold`. Whoever makes one must `release` it before the step thread is to end."""

    def __init__(self, runner: ModelRunner) -> None:
        self._start = runner.start
        self._changed = threading.Condition()
        self._max_steps = math.inf
        self._is_waiting = False
        self.num_steps = 0
        runner.start = self._start_when_open  # type: ignore[method-assign]

    def hold(self, after: int = 0) -> None:
        """Let `after` more steps begin; the one that would follow them stands at the gate."""
        with self._changed:
            self._max_steps = self.num_steps + after

    def release(self) -> None:
        """Let all steps through, for good."""
        with self._changed:
            self._max_steps = math.inf
            self._changed.notify_all()

    async def reached(self) -> None:
        """Wait until the step thread stands at the gate; all that it told the loop before has been read."""
        assert await asyncio.to_thread(self._wait_reached), "no step came to the gate"
        await settle()

    async def step(self, count: int = 1) -> None:
        """From the gate, let `count` steps through, and wait until the next one stands there.

        Commands that were put to the step thread before are carried out between the first of them and the
        next.
        """
        await settle()  # whoever was started just now puts its commands
        with self._changed:
            assert self._is_waiting, "the step thread does not stand at the gate"
            self._max_steps = self.num_steps + count
            self._changed.notify_all()
        await self.reached()

    # ------------------------------------------------------------ on the step thread

    def _start_when_open(self, plan: StepPlan) -> RunningStep:
        with self._changed:
            self._is_waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.num_steps < self._max_steps)
            self._is_waiting = False
            self.num_steps += 1
        return self._start(plan)

    def _wait_reached(self) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_waiting and self.num_steps >= self._max_steps, WAIT_S
            )
