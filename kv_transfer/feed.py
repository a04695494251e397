"""Feed: which blocks live on this worker, told to whoever watches: a snapshot, then numbered events.

Between them, the worker's load with a digest of the set.

Owns the set of hashes as it was told, and the numbers. `append` and `publish_status` may be called from any
one thread (the step thread); the rest lives on the IO loop. A watcher that does not keep up loses its backlog
and gets a fresh snapshot in its place.

The last status is repeated by the loop's own timer: a step that takes long must not look like a dead
worker. A step thread that is stuck is the health check's business, a frozen process is silent here too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from core.block_hash import BlockHash
from core.jobs import BlockSnapshot, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, WorkerStatus

_MAX_PENDING_EVENTS = 65_536


def hash_digest(block_hash: BlockHash) -> int:
    """A block's share of the digest's XOR: its hash's first eight bytes, little-endian."""
    return int.from_bytes(block_hash[:8], "little")


class Feed:
    """One per worker. What is told before `start` is kept for it."""

    def __init__(self, max_pending_events: int = _MAX_PENDING_EVENTS, repeat_s: float = 1.0) -> None:
        self._max_pending = max_pending_events
        self._repeat_s = repeat_s
        self._repetition: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._incoming: deque[Sequence[BlockEvent] | WorkerStatus] = deque()
        self._is_drain_due = False
        self._is_closed = False
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._xor = 0
        self._number = 0
        self._status: WorkerStatus | None = None
        self._is_status_new = False
        self._watchers: set[_Watcher] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called on `loop`, on which watchers will wait."""
        self._loop = loop
        self._drain()
        self._repetition = loop.call_later(self._repeat_s, self._repeat)

    def close(self) -> None:
        """End all watchers, and those to come."""
        self._is_closed = True
        if self._repetition is not None:
            self._repetition.cancel()
        for watcher in list(self._watchers):
            watcher.end()

    def append(self, events: Sequence[BlockEvent]) -> None:
        """Changes of the set of hashes, in order. From the step thread; never waits."""
        if events:
            self._incoming.append(tuple(events))
            self._schedule()

    def publish_status(self, status: WorkerStatus) -> None:
        """The load, as of all events appended before. From the thread that appends; never waits."""
        self._incoming.append(status)
        self._schedule()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def digest(self) -> tuple[int, int]:
        """(count, XOR) of the set as told so far."""
        return len(self._parents), self._xor

    async def subscribe(self) -> AsyncGenerator[WatchEvent, None]:
        """A snapshot, the last status if there is one, then events and statuses as they come.

        A consumer that falls too far behind gets a snapshot again. Ends when the feed is closed.
        """
        watcher = _Watcher(self._max_pending, self._whole)
        if self._is_closed:
            return
        self._watchers.add(watcher)
        try:
            while (event := await watcher.next()) is not None:
                yield event
        finally:
            self._watchers.discard(watcher)

    # ------------------------------------------------------------ on the loop

    def _whole(self) -> list[WatchEvent]:
        """All that a watcher has to know at this moment."""
        snapshot = BlockSnapshot(tuple(self._parents), tuple(self._parents.values()))
        whole = [WatchEvent(self._number, snapshot=snapshot, digest=self.digest)]
        if self._status is not None:
            whole.append(WatchEvent(self._number, status=self._status, digest=self.digest))
        return whole

    def _repeat(self) -> None:
        assert self._loop is not None
        if self._status is not None and not self._is_status_new:
            self._tell(WatchEvent(self._number, status=self._status, digest=self.digest))
        self._is_status_new = False
        self._repetition = self._loop.call_later(self._repeat_s, self._repeat)

    def _schedule(self) -> None:
        # Two threads may both see False: then one drain finds nothing. The flag is lowered before the drain
        # reads, so that what is appended after its last look raises it again.
        if self._loop is not None and not (self._is_drain_due or self._is_closed):
            self._is_drain_due = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        while self._incoming:
            item = self._incoming.popleft()
            if isinstance(item, WorkerStatus):
                self._status = item
                self._is_status_new = True
                self._tell(WatchEvent(self._number, status=item, digest=self.digest))
            elif events := tuple(event for event in item if self._apply(event)):
                self._number += len(events)
                self._tell(WatchEvent(self._number, events=events))

    def _apply(self, event: BlockEvent) -> bool:
        """Whether the event changes the set; one that does not is no news."""
        if event.kind is BlockEventKind.CLEARED:
            self._parents.clear()
            self._xor = 0
            return True
        block_hash = event.block_hash
        assert block_hash is not None
        if (event.kind is BlockEventKind.STORED) == (block_hash in self._parents):
            return False
        self._xor ^= hash_digest(block_hash)
        if event.kind is BlockEventKind.STORED:
            self._parents[block_hash] = event.parent
        else:
            del self._parents[block_hash]
        return True

    def _tell(self, event: WatchEvent) -> None:
        for watcher in list(self._watchers):
            watcher.put(event)


class _Watcher:
    """What one consumer has not read yet, bounded; begins, and begins again after a loss, with the whole."""

    def __init__(self, max_pending_events: int, whole: Callable[[], list[WatchEvent]]) -> None:
        self._max_pending = max_pending_events
        self._whole = whole
        self._is_whole_due = True  # made when it is read: what comes before that is in it
        self._pending: deque[WatchEvent] = deque()
        self._num_pending = 0
        self._is_ended = False
        self._wake = asyncio.Event()

    def put(self, event: WatchEvent) -> None:
        if self._is_whole_due:
            return
        if event.status is not None and self._pending and self._pending[-1].status is not None:
            self._pending[-1] = event  # only the newest load is news
        else:
            self._pending.append(event)
            self._num_pending += len(event.events)
        if self._num_pending > self._max_pending:
            self._is_whole_due = True
        self._wake.set()

    def end(self) -> None:
        self._is_ended = True
        self._wake.set()

    async def next(self) -> WatchEvent | None:
        while not (self._pending or self._is_whole_due or self._is_ended):
            self._wake.clear()
            await self._wake.wait()
        if self._is_ended:
            return None
        if self._is_whole_due:
            self._is_whole_due, self._num_pending = False, 0
            self._pending = deque(self._whole())
        event = self._pending.popleft()
        self._num_pending -= len(event.events)
        return event
