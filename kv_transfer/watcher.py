"""Watcher: what one reader of a feed has not read yet, bounded.

Owns the backlog. It begins, and begins again after a loss, with a summary in place of what is missing. Lives
on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from core.clock import Clock
from core.jobs import WatchEvent


class Watcher:
    """One per reader. `summarize`: how things are at the moment, number and digest."""

    def __init__(self, max_pending_events: int, summarize: Callable[[], WatchEvent], clock: Clock) -> None:
        self._max_pending = max_pending_events
        self._summarize = summarize
        self._clock = clock
        self._is_summary_due = True  # made when it is read: what comes before that is in it
        self._pending: deque[tuple[WatchEvent, float]] = deque()
        self._num_pending = 0
        self._is_ended = False
        self._wake = asyncio.Event()

    def put(self, event: WatchEvent, told_at: float) -> None:
        """One message more; `told_at`: when its events happened."""
        if self._is_summary_due:
            return
        if not event.events and self._pending and not self._pending[-1][0].events:
            self._pending[-1] = (event, told_at)  # only the newest load is news
        else:
            self._pending.append((event, told_at))
            self._num_pending += len(event.events)
        if self._num_pending > self._max_pending:
            self._is_summary_due = True
            self._pending.clear()
            self._num_pending = 0
        self._wake.set()

    def end(self) -> None:
        self._is_ended = True
        self._wake.set()

    async def next(self) -> WatchEvent | None:
        """The next message, as soon as there is one; None at the end."""
        while not (self._pending or self._is_summary_due or self._is_ended):
            self._wake.clear()
            await self._wake.wait()
        if self._is_ended:
            return None
        if self._is_summary_due:
            self._is_summary_due = False
            return self._summarize()
        event, told_at = self._pending.popleft()
        self._num_pending -= len(event.events)
        if event.events:
            return replace(event, age_s=max(0.0, self._clock.now() - told_at))
        return event
