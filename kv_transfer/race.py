"""Two coroutines of which the first to end decides. Runs on the caller's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def guarded(work: Coroutine[Any, Any, T], guard: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, unless `guard` raises first: then its error. The loser is cancelled."""
    working, guarding = asyncio.create_task(work), asyncio.create_task(guard)
    try:
        await asyncio.wait((working, guarding), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            guarding.result()  # raises
            raise AssertionError("a guard ends only by raising")
        return working.result()
    finally:
        for task in (working, guarding):
            task.cancel()
        await asyncio.gather(working, guarding, return_exceptions=True)
