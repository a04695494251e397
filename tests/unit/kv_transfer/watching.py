"""Watching: a consumer of a feed that keeps the set as a router would; and the events that tests tell."""

from __future__ import annotations

import asyncio
import hashlib

from core.block_hash import NUM_PARTS, BlockHash, digest_part
from core.ids import Epoch
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, WorkerStatus
from kv_transfer.feed import Feed
from tests.unit.kv_transfer.doubles import DECODE

EPOCH = Epoch(7)


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest())


def stored(number: int, parent: int | None = None) -> BlockEvent:
    return BlockEvent(BlockEventKind.STORED, name(number), name(parent) if parent is not None else None)


def removed(number: int) -> BlockEvent:
    return BlockEvent(BlockEventKind.REMOVED, name(number))


CLEARED = BlockEvent(BlockEventKind.CLEARED)


def status(num_waiting: int = 0) -> WorkerStatus:
    return WorkerStatus(DECODE, False, num_waiting, 0, 0, 0, 10, 10, 0, 0, 0, 8)


class Watching:
    """A consumer that keeps the set as a router would, and checks numbers and digests as it goes; where the
    numbers leave a gap it fetches the set.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.events: list[WatchEvent] = []
        self.names: set[BlockHash] = set()
        self.number = -1
        self.num_fetches = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.feed.subscribe():
            self._take(event)
            await self.may_read.wait()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await asyncio.sleep(0)

    def _take(self, event: WatchEvent) -> None:
        assert (event.status is None) or not event.events
        assert event.epoch == EPOCH
        self.events.append(event)
        if event.number != self.number + len(event.events):
            assert not event.events, "a gap is told by a digest"
            self.names = whole_set(self.feed)
            self.num_fetches += 1
        self.number = event.number
        for change in event.events:
            if change.kind is BlockEventKind.CLEARED:
                self.names.clear()
            elif change.kind is BlockEventKind.STORED:
                assert change.block_hash is not None
                self.names.add(change.block_hash)
            else:
                assert change.block_hash is not None
                self.names.remove(change.block_hash)
        if event.digest is not None:
            assert event.digest == digest_of(self.names)


def digest_of(names: set[BlockHash]) -> tuple[int, int]:
    total = 0
    for block_hash in names:
        total ^= digest_part(block_hash)
    return len(names), total


def pages_of(feed: Feed) -> list[BlockPage]:
    pages, first = [], 0
    while first < NUM_PARTS:
        pages.append(feed.page(SnapshotJob(first, NUM_PARTS)))
        first = pages[-1].end_part
    return pages


def whole_set(feed: Feed) -> set[BlockHash]:
    return {block_hash for page in pages_of(feed) for block_hash in page.hashes}


def started_feed(max_pending_events: int = 1000) -> Feed:
    feed = Feed(EPOCH, max_pending_events)
    feed.start(asyncio.get_running_loop())
    return feed
