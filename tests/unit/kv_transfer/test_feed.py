"""Who watches can always rebuild the exact set of blocks, or knows that it must watch anew."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.jobs import WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, WorkerStatus
from kv_transfer.feed import Feed, hash_digest
from tests.unit.kv_transfer.doubles import DECODE, in_virtual_time, quick, until


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "little") + bytes(8))


def stored(number: int, parent: int | None = None) -> BlockEvent:
    return BlockEvent(BlockEventKind.STORED, name(number), name(parent) if parent is not None else None)


def removed(number: int) -> BlockEvent:
    return BlockEvent(BlockEventKind.REMOVED, name(number))


CLEARED = BlockEvent(BlockEventKind.CLEARED)


def status(num_waiting: int = 0) -> WorkerStatus:
    return WorkerStatus(DECODE, False, num_waiting, 0, 0, 0, 10, 10, 0, 0, 0, 8)


class Watching:
    """A consumer that keeps the set as a router would, and checks numbers and digests as it goes."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.events: list[WatchEvent] = []
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.number = -1
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
        assert (event.status is not None) + (event.snapshot is not None) + bool(event.events) == 1
        self.events.append(event)
        if event.snapshot is not None:
            self.parents = dict(zip(event.snapshot.hashes, event.snapshot.parents, strict=True))
        else:
            assert event.number == self.number + len(event.events), "a gap"
        self.number = event.number
        for change in event.events:
            if change.kind is BlockEventKind.CLEARED:
                self.parents.clear()
            elif change.kind is BlockEventKind.STORED:
                assert change.block_hash is not None
                self.parents[change.block_hash] = change.parent
            else:
                assert change.block_hash is not None
                del self.parents[change.block_hash]
        if event.digest is not None:
            total = 0
            for block_hash in self.parents:
                total ^= hash_digest(block_hash)
            assert event.digest == (len(self.parents), total)


def started_feed(max_pending_events: int = 1000) -> Feed:
    feed = Feed(max_pending_events)
    feed.start(asyncio.get_running_loop())
    return feed


@in_virtual_time
async def test_a_watcher_gets_a_snapshot_then_the_last_status_then_numbered_events() -> None:
    feed = started_feed()
    feed.append([stored(1), stored(2, 1)])
    feed.publish_status(status(3))
    await asyncio.sleep(0)
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    feed.append([stored(3, 2), removed(1)])
    feed.publish_status(status(4))
    await asyncio.sleep(0.1)
    first, second, third, fourth = watching.events
    assert first.snapshot is not None
    assert first.snapshot.hashes == (name(1), name(2))
    assert first.snapshot.parents == (None, name(1))
    assert second.status == status(3)
    assert third.events == (stored(3, 2), removed(1))
    assert fourth.status == status(4)
    assert [event.number for event in watching.events] == [2, 2, 4, 4]
    assert watching.parents == {name(2): name(1), name(3): name(2)}
    await watching.stop()
    assert feed.num_watchers == 0


@in_virtual_time
async def test_what_is_told_before_the_start_is_kept() -> None:
    feed = Feed()
    feed.append([stored(1)])
    feed.publish_status(status())
    feed.start(asyncio.get_running_loop())
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    assert watching.parents == {name(1): None}
    assert watching.events[-1].status == status()
    await watching.stop()


@in_virtual_time
async def test_an_event_that_changes_nothing_is_no_news() -> None:
    feed = started_feed()
    watching = Watching(feed)
    feed.append([stored(1)])
    feed.append([stored(1)])
    feed.append([removed(2)])
    feed.append([])
    await asyncio.sleep(0.1)
    assert watching.number == 1
    assert feed.digest == (1, hash_digest(name(1)))
    await watching.stop()


@in_virtual_time
async def test_a_slow_watcher_loses_its_backlog_and_gets_the_whole_set_in_its_place() -> None:
    feed = started_feed(max_pending_events=10)
    feed.publish_status(status(1))
    slow, quick = Watching(feed), Watching(feed)
    await asyncio.sleep(0.1)
    slow.may_read.clear()
    for number in range(50):
        feed.append([stored(number)])
        await asyncio.sleep(0.01)
    slow.may_read.set()
    await asyncio.sleep(0.1)
    assert sum(event.snapshot is not None for event in slow.events) == 2
    assert slow.parents == quick.parents == dict.fromkeys(map(name, range(50)))
    assert slow.events[-1].status == status(1)
    feed.append([stored(50)])
    await asyncio.sleep(0.1)
    assert slow.events[-1].events == (stored(50),)
    await slow.stop()
    await quick.stop()


@in_virtual_time
async def test_the_last_status_is_repeated_while_a_long_step_keeps_the_step_thread_silent() -> None:
    feed = started_feed()
    feed.publish_status(status(5))
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    heard = len(watching.events)
    await asyncio.sleep(10)
    repeated = watching.events[heard:]
    assert 9 <= len(repeated) <= 10
    assert all(event.status == status(5) for event in repeated)
    feed.close()
    await asyncio.wait_for(watching.task, 1)


@in_virtual_time
async def test_a_watcher_that_reads_slowly_gets_only_the_newest_of_adjacent_statuses() -> None:
    feed = started_feed(max_pending_events=10)
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    watching.may_read.clear()
    feed.append([stored(1)])
    await asyncio.sleep(0.1)
    for number in range(100):
        feed.publish_status(status(number))
        await asyncio.sleep(0.01)
    watching.may_read.set()
    await asyncio.sleep(0.1)
    assert watching.events[-1].status == status(99)
    assert len(watching.events) < 10
    await watching.stop()


@in_virtual_time
async def test_closing_ends_all_watchers_and_those_to_come() -> None:
    feed = started_feed()
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    feed.close()
    await asyncio.wait_for(watching.task, 1)
    assert [event async for event in feed.subscribe()] == []
    feed.append([stored(1)])  # a step thread that still runs does no harm


@in_virtual_time
async def test_events_from_the_step_thread_arrive_in_order_and_complete() -> None:
    feed = started_feed(max_pending_events=100_000)
    watching = Watching(feed)
    await asyncio.sleep(0)

    def step() -> None:
        for number in range(5000):
            feed.append([stored(number)])
            if number % 3 == 0:
                feed.append([removed(number)])
            if number % 100 == 0:
                feed.publish_status(status(number))

    thread = threading.Thread(target=step)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - a thread has no awaitable end
        await asyncio.sleep(0)
    await until(lambda: watching.number == 5000 + 1667)
    assert set(watching.parents) == {name(number) for number in range(5000) if number % 3}
    await watching.stop()


changes = st.one_of(
    st.integers(0, 12).map(stored), st.integers(0, 12).map(removed), st.just(CLEARED), st.just(None)
)


@quick
@given(st.lists(st.lists(changes, max_size=4), max_size=30), st.integers(0, 29))
def test_any_watcher_of_any_history_ends_with_the_true_set(
    batches: Sequence[Sequence[BlockEvent | None]], joined_at: int
) -> None:
    @in_virtual_time
    async def run() -> None:
        feed = started_feed()
        true_set: set[BlockHash] = set()
        watchers = [Watching(feed)]
        for position, batch in enumerate(batches):
            if position == joined_at:
                watchers.append(Watching(feed))
                await asyncio.sleep(0)
            feed.append([change for change in batch if change is not None])
            if None in batch:
                feed.publish_status(status(position))
            for change in batch:
                if change is CLEARED:
                    true_set.clear()
                elif change is not None:
                    assert change.block_hash is not None
                    (true_set.add if change.kind is BlockEventKind.STORED else true_set.discard)(
                        change.block_hash
                    )
            if position % 2:
                await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        for watching in watchers:
            assert set(watching.parents) == true_set
            await watching.stop()

    run()


def test_the_digest_is_the_first_eight_bytes_little_endian() -> None:
    assert hash_digest(BlockHash(bytes(range(16)))) == 0x0706050403020100


@pytest.mark.parametrize("max_pending", [1, 2])
def test_even_the_smallest_buffer_delivers_the_snapshot(max_pending: int) -> None:
    @in_virtual_time
    async def run() -> None:
        feed = started_feed(max_pending)
        watching = Watching(feed)
        await asyncio.sleep(0.1)
        assert watching.events[0].snapshot is not None
        await watching.stop()

    run()
