"""StepThread: the one thread of a worker that owns scheduler, allocator and pool.

Handlers on other threads put commands into its queue and await futures; nothing here takes a lock. While
there is work it steps, running all waiting commands between two steps; idle, it sleeps on the queue.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from core.errors import WorkerLost

T = TypeVar("T")
_Command = Callable[[], None]

_JOIN_S = 0.5

_log = logging.getLogger(__name__)


class StepThread:
    """Runs `step()` while it returns True; `idle_tick_s` bounds how long timers wait while idle.

    `step` must handle its own failures; an exception that escapes it is logged and the loop goes on, since
    one broken step must not take the worker down. `on_tick` runs before each step and at least every
    `idle_tick_s` (expiry of tickets, deadlines). `pause_s`: how long a step waits for what others do;
    commands run meanwhile.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        on_tick: Callable[[], None],
        idle_tick_s: float = 0.1,
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._step = step
        self._on_tick = on_tick
        self._idle_tick_s = idle_tick_s
        self._pause_s = pause_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the step that runs, run what is queued, end. Safe to call twice; from any other thread.

        Returns after `timeout_s` if it has not ended: see `is_alive`.
        """
        self._commands.put(self._set_stopping)
        left_s = timeout_s
        while self._thread.is_alive() and left_s > 0:
            # in slices: one that passed while the process was stopped gave the thread no time
            self._thread.join(min(left_s, _JOIN_S))
            left_s -= _JOIN_S

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: _Command) -> None:
        """Run `command` on the step thread, between steps; nobody waits for it."""
        self._commands.put(command)

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` on the step thread; the future carries its result or exception. Raises WorkerLost if
        the thread has ended: nobody would run it.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command()
            except BaseException as error:  # noqa: BLE001 - whoever awaits the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(run)
        # the thread raises the flag before it looks into the queue for the last time
        if self._has_ended and future.cancel():
            raise WorkerLost("the worker's step thread has ended")
        return future

    async def call(self, command: Callable[[], T]) -> T:
        """`submit` for coroutines."""
        return await asyncio.wrap_future(self.submit(command))

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        has_work = False
        while not self._is_stopping:
            self._drain_commands(wait=not has_work)
            if has_work:
                self._pause()
            self._guard(self._on_tick)
            try:
                has_work = self._step()
            except Exception:  # noqa: BLE001 - logged; the worker outlives one broken step
                _log.exception("step failed outside its own handling")
                has_work = False
        self._has_ended = True
        self._drain_commands(wait=False)

    def _drain_commands(self, wait: bool) -> None:
        """Run the commands that wait now; those that come meanwhile wait for the next step, so that a peer
        that pushes as fast as blocks are written cannot keep the streams from stepping.
        """
        num_waiting = self._commands.qsize()
        try:
            if wait and num_waiting == 0:
                self._guard(self._commands.get(timeout=self._idle_tick_s))
            for _ in range(num_waiting):
                self._guard(self._commands.get_nowait())
        except queue.Empty:
            return

    def _pause(self) -> None:
        """Run the commands that come until the next step is due."""
        until = time.monotonic() + self._pause_s()
        while (left_s := until - time.monotonic()) > 0 and not self._is_stopping:
            try:
                self._guard(self._commands.get(timeout=left_s))
            except queue.Empty:
                return

    def _guard(self, command: _Command) -> None:
        try:
            command()
        except Exception:  # noqa: BLE001 - logged; the worker outlives one broken command
            _log.exception("command on the step thread failed")


class NewSteps(Protocol):
    """How a worker makes its step thread."""

    def __call__(
        self,
        name: str,
        step: Callable[[], bool],
        on_tick: Callable[[], None],
        /,
        *,
        pause_s: Callable[[], float] = ...,
    ) -> StepThread: ...
