"""LoopSteps: a worker's step thread as a task of the event loop, in virtual time.

The same surface and the same order as `engine.step_thread.StepThread`: waiting commands, tick, step. A step
takes the time that `duration_s` draws; while the process is stopped none is begun.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from core.errors import WorkerLost
from tests.simulation.process import Process

T = TypeVar("T")

_IDLE_TICK_S = 0.5


class LoopSteps:
    """Made by a worker in place of a StepThread; ends with its process."""

    def __init__(
        self,
        process: Process,
        duration_s: Callable[[], float],
        step: Callable[[], bool],
        on_tick: Callable[[], None],
    ) -> None:
        self._process = process
        self._duration_s = duration_s
        self._step = step
        self._on_tick = on_tick
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._is_ended = False

    def start(self) -> None:
        self._process.spawn(self._run())

    def stop(self, timeout_s: float = 10.0) -> None:
        self._is_ended = True
        while self._commands:
            self._commands.popleft()()
        self._wake.set()

    @property
    def is_alive(self) -> bool:
        return not self._is_ended

    def post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def submit(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 - whoever awaits the future gets it
                future.set_exception(error)

        if self._is_ended:
            raise WorkerLost("the worker's step thread has ended")
        self.post(run)
        return future

    async def call(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.submit(command))

    async def _run(self) -> None:
        has_work = False
        while not self._is_ended:
            if not has_work and not self._commands:
                await self._wait()
            await self._process.while_stopped()
            if self._is_ended:
                return
            self._wake.clear()
            for _ in range(len(self._commands)):
                self._commands.popleft()()
            self._on_tick()
            if has_work:
                await asyncio.sleep(self._duration_s())
            else:
                await asyncio.sleep(0.0)
            has_work = not self._is_ended and self._step()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_IDLE_TICK_S):
                await self._wake.wait()
        except TimeoutError:
            return
