"""ToldWorker: a worker as the index sees it, its set kept by a real feed; messages are taken by hand.

Runs on an event loop of its own, a few rounds at a time, so that tests stay plain functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from core.block_hash import BlockHash
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, BlockTier, WorkerStatus
from kv_transfer.feed import Feed
from router.prefix_index import PrefixIndex
from tests.doubles import FakeClock


def block(part: int, number: int) -> BlockHash:
    """A name in part `part`, of those below 4,096."""
    return BlockHash(
        bytes([part >> 4, (part & 15) << 4]) + number.to_bytes(4, "big") + bytes([1 + number % 251]) * 10
    )


def stored(block_hash: BlockHash, tier: BlockTier = BlockTier.DEVICE) -> BlockEvent:
    return BlockEvent(BlockEventKind.STORED, block_hash, None, tier)


def removed(block_hash: BlockHash) -> BlockEvent:
    return BlockEvent(BlockEventKind.REMOVED, block_hash)


CLEARED = BlockEvent(BlockEventKind.CLEARED)


class ToldWorker:
    """`take` returns what the open streams have told since the last call."""

    def __init__(self, name: str, epoch: int, loop: asyncio.AbstractEventLoop) -> None:
        self.worker_id = WorkerId(name)
        self.epoch = Epoch(epoch)
        self.held: dict[BlockHash, BlockTier] = {}
        self._ref = WorkerRef(self.worker_id, Role.PREFILL, self.epoch, "loopback:x")
        self._loop = loop
        self._told: list[WatchEvent] = []
        self._stream: asyncio.Task[None] | None = None
        self._open()
        self._told = self.watch()

    def _open(self) -> None:
        self._feed = Feed(self.epoch)
        self._run(self._start())

    async def _start(self) -> None:
        self._feed.start(asyncio.get_running_loop())

    def watch(self) -> list[WatchEvent]:
        """Begin a stream in place of the open one; what it tells first."""
        self.close()
        self._stream = self._loop.create_task(self._read())
        return self.take()

    def number_anew(self) -> None:
        """The same process begins with another role: the same blocks, numbers from 0."""
        self.close()
        self._feed.close()
        self._open()
        self.tell(*(stored(block_hash, tier) for block_hash, tier in self.held.items()))

    def tell(self, *events: BlockEvent) -> None:
        for event in events:
            if event.kind is BlockEventKind.CLEARED:
                self.held.clear()
            elif event.kind is BlockEventKind.STORED:
                assert event.block_hash is not None
                self.held[event.block_hash] = event.tier
            else:
                assert event.block_hash is not None
                self.held.pop(event.block_hash, None)
        self._feed.append(events)

    def report(self) -> None:
        self._feed.publish_status(WorkerStatus(self._ref, False, 0, 0, 0, 0, 10, 10, 0, 0, 0, 8))

    def take(self) -> list[WatchEvent]:
        self._run(_rounds())
        told, self._told = self._told, []
        return told

    def page(self, job: SnapshotJob) -> BlockPage:
        self._run(_rounds())
        return self._feed.page(job)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._run(_rounds())
            self._stream = None

    def end(self) -> None:
        self.close()
        self._feed.close()

    async def _read(self) -> None:
        async for event in self._feed.subscribe():
            self._told.append(event)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)


async def _rounds() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def deliver(index: PrefixIndex, worker: ToldWorker, events: Iterable[WatchEvent] | None = None) -> None:
    """All that the worker has told, or these."""
    for event in worker.take() if events is None else events:
        index.apply(worker.worker_id, event)


def repair(index: PrefixIndex, worker: ToldWorker) -> int:
    """Fetch what the index lacks; the number of pages."""
    num_pages = 0
    while (job := index.ask(worker.worker_id)) is not None:
        for _ in index.fill(worker.worker_id, job, worker.page(job)):
            pass
        num_pages += 1
        assert num_pages < 100, "the repair does not end"
    return num_pages


def view_of(index: PrefixIndex, worker: ToldWorker, names: Iterable[BlockHash]) -> set[BlockHash]:
    """Those of `names` that the index says the worker holds."""
    return {name for name in names if index.match([name]).get(worker.worker_id) == 1}


class IndexSite:
    """Workers `a` and `b`, and an index that watches them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = FakeClock()
        self.index = PrefixIndex(self.clock)
        self.a, self.b = ToldWorker("a", 1, loop), ToldWorker("b", 2, loop)
        for worker in (self.a, self.b):
            self.index.join(worker.worker_id, worker.epoch)
            deliver(self.index, worker)

    def end(self) -> None:
        self.a.end()
        self.b.end()
