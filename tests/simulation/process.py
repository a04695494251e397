"""Process: a thing that can be killed and stopped, with everything that runs in it.

A killed process runs nothing any more and answers nobody; whoever is connected sees the connection break. A
stopped one takes and sends no message and begins no step until it goes on; its timers still fire, as they do
in a real one once it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Process:
    """Named for messages; `errors` gets what tasks of it died of that nobody awaited."""

    def __init__(self, name: str, errors: list[str]) -> None:
        self.name = name
        self.is_dead = False
        self.died = asyncio.Event()
        self._errors = errors
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_stopped(self) -> bool:
        return not self._goes_on.is_set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that dies with the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def while_stopped(self) -> None:
        """Returns at once unless the process is stopped."""
        await self._goes_on.wait()

    def stop(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def kill(self) -> None:
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()
        self.died.set()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.is_dead:
            self._errors.append(f"{self.name}: {task.exception()!r}")
