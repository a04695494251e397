"""Feed: which blocks live on this worker, told to whoever watches: numbered events, the load, and a digest.

Owns the set of blocks as it was told, and the numbers. `append` and `publish_status` may be called from any
one thread (the step thread); the rest lives on the IO loop. Whoever lacks something asks for pages of the
set, made from it as it is at that moment: the feed keeps nothing for those who ask. A watcher that does not
keep up loses its backlog, and gets the digest in its place.

The last status is repeated by the loop's own timer: a step that takes long must not look like a dead
worker. A step thread that is stuck is the health check's business, a frozen process is silent here too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from core.clock import Clock, MonotonicClock
from core.ids import Epoch
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, WorkerStatus
from kv_transfer.block_parts import BlockParts
from kv_transfer.watcher import Watcher

MAX_BATCH = 512
"""Events in one message, and about as many blocks in one page."""

_MAX_PENDING_EVENTS = 65_536


class Feed:
    """One per process, whose epoch is `epoch`: numbers and set outlive a change of role, for which it is
    closed and started again. What is told before `start` is kept for it.
    """

    def __init__(
        self,
        epoch: Epoch,
        max_pending_events: int = _MAX_PENDING_EVENTS,
        repeat_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._epoch = epoch
        self._max_pending = max_pending_events
        self._repeat_s = repeat_s
        self._clock = clock or MonotonicClock()
        self._repetition: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._incoming: deque[tuple[Sequence[BlockEvent] | WorkerStatus, float]] = deque()
        self._is_drain_due = False
        self._is_closed = False
        self._blocks = BlockParts()
        self._number = 0
        self._status: WorkerStatus | None = None
        self._is_status_new = False
        self._watchers: set[Watcher] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called on `loop`, on which watchers will wait; again after `close`."""
        self._loop = loop
        self._is_closed = False
        self._status = None
        self._drain()
        self._repetition = loop.call_later(self._repeat_s, self._repeat)

    def close(self) -> None:
        """End all watchers, and those to come until the next `start`."""
        self._is_closed = True
        if self._repetition is not None:
            self._repetition.cancel()
        for watcher in list(self._watchers):
            watcher.end()

    def append(self, events: Sequence[BlockEvent]) -> None:
        """Changes of the set of hashes, in order. From the step thread; never waits."""
        if events:
            self._incoming.append((tuple(events), self._clock.now()))
            self._schedule()

    def publish_status(self, status: WorkerStatus) -> None:
        """The load, as of all events appended before. From the thread that appends; never waits."""
        self._incoming.append((status, self._clock.now()))
        self._schedule()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @property
    def digest(self) -> tuple[int, int]:
        """(count, XOR) of the set as told so far."""
        return self._blocks.digest

    # ------------------------------------------------------------ on the loop

    def arrived(self, num_tokens: int, num_seqs: int, num_blocks: int) -> None:
        """A job has come that no status counts yet: whoever watches hears of it now, not with the next
        status. So each router knows what the others have placed, as soon as it is here. `num_tokens` to be
        read and `num_blocks` to be taken are counted as if nothing of the prompt were cached.
        """
        status = self._status
        if status is None:
            return
        num_free = min(num_blocks, status.num_free_blocks)
        num_evicted = min(num_blocks - num_free, status.num_cached_blocks)
        self._tell_status(
            replace(
                status,
                num_waiting=status.num_waiting + num_seqs,
                num_waiting_tokens=status.num_waiting_tokens + num_tokens,
                num_free_blocks=status.num_free_blocks - num_free,
                num_cached_blocks=status.num_cached_blocks - num_evicted,
                num_held_blocks=status.num_held_blocks + num_free + num_evicted,
            )
        )

    def page(self, job: SnapshotJob) -> BlockPage:
        """The set as it is now, of the parts that `job` asks for: as many of them as make about `MAX_BATCH`
        blocks, one at least.
        """
        return page_of(self._blocks, self._epoch, self._number, job)

    async def subscribe(self) -> AsyncGenerator[WatchEvent, None]:
        """The digest, with the last status if there is one, then events and statuses as they come.

        A consumer that falls too far behind gets the digest again, and a gap before it. Ends when the feed
        is closed.
        """
        watcher = Watcher(self._max_pending, self._summary, self._clock)
        if self._is_closed:
            return
        self._watchers.add(watcher)
        try:
            while (event := await watcher.next()) is not None:
                yield event
        finally:
            self._watchers.discard(watcher)

    def _summary(self) -> WatchEvent:
        """How things are at this moment."""
        return WatchEvent(self._number, status=self._status, digest=self.digest, epoch=self._epoch)

    def _repeat(self) -> None:
        assert self._loop is not None
        if self._status is not None and not self._is_status_new:
            self._tell(self._summary())
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
            item, told_at = self._incoming.popleft()
            if isinstance(item, WorkerStatus):
                self._tell_status(item)
                continue
            news = [event for event in item if self._blocks.apply(event)]
            for start in range(0, len(news), MAX_BATCH):
                batch = tuple(news[start : start + MAX_BATCH])
                self._number += len(batch)
                self._tell(WatchEvent(self._number, events=batch, epoch=self._epoch), told_at)

    def _tell_status(self, status: WorkerStatus) -> None:
        self._status = status
        self._is_status_new = True
        self._tell(self._summary())

    def _tell(self, event: WatchEvent, told_at: float = 0.0) -> None:
        for watcher in list(self._watchers):
            watcher.put(event, told_at)


def page_of(blocks: BlockParts, epoch: Epoch, number: int, job: SnapshotJob) -> BlockPage:
    """The page that answers `job`, of a set that holds all events up to `number`."""
    num_told = 0
    changed: list[int] = []
    part = job.first_part
    while part < job.end_part and (num_told == 0 or num_told + blocks.size_of(part) <= MAX_BATCH):
        position = part - job.first_part
        known = job.known[position] if position < len(job.known) else None
        if known != blocks.digest_of(part):
            changed.append(part)
            num_told += blocks.size_of(part)
        part += 1
    told = [block for each in changed for block in blocks.blocks_of(each)]
    return BlockPage(
        epoch=epoch,
        number=number,
        first_part=job.first_part,
        end_part=part,
        changed=tuple(changed),
        hashes=tuple(block_hash for block_hash, _ in told),
        tiers=tuple(tier for _, tier in told) if any(tier for _, tier in told) else (),
    )
