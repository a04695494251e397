"""The loads that a worker tells whoever watches it, while the body of `watched` runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker


@asynccontextmanager
async def watched(worker: DecodeWorker | PrefillWorker) -> AsyncIterator[list[tuple[int, int]]]:
    """Sequences that wait and that run, one pair for each status, in order; more are added as they come."""
    told: list[tuple[int, int]] = []

    async def watch() -> None:
        async for event in worker.watch():
            if event.status is not None:
                told.append((event.status.num_waiting, event.status.num_running))

    watching = asyncio.create_task(watch())
    try:
        yield told
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
