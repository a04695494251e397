"""A thread that runs one asyncio loop, and the two ways to hand it work.

A worker's gRPC server lives on such a loop, apart from the thread that Ray Serve calls the shell on: a slow
health check or constructor there never delays a token here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class IoThread:
    """Started by the constructor, ended by `close`. `run` and `close` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait for the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def run_from_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The same, awaited from another loop, which stays free meanwhile."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Cancel what still runs on the loop, stop it and wait for the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
