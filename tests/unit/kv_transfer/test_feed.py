"""Who watches can always rebuild the exact set of blocks, or knows that it must ask for its pages."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import NUM_PARTS, BlockHash, digest_part, part_of
from core.ids import Epoch
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, BlockTier, WorkerStatus
from kv_transfer.feed import MAX_BATCH, Feed
from tests.doubles import FakeClock
from tests.unit.kv_transfer.doubles import DECODE, in_virtual_time, quick, until

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


@in_virtual_time
async def test_a_watcher_gets_the_digest_with_the_last_status_then_numbered_events() -> None:
    feed = started_feed()
    feed.append([stored(1), stored(2, 1)])
    feed.publish_status(status(3))
    await asyncio.sleep(0)
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    feed.append([stored(3, 2), removed(1)])
    feed.publish_status(status(4))
    await asyncio.sleep(0.1)
    first, second, third = watching.events
    assert first.status == status(3)
    assert first.digest == digest_of({name(1), name(2)})
    assert second.events == (stored(3, 2), removed(1))
    assert third.status == status(4)
    assert [event.number for event in watching.events] == [2, 4, 4]
    assert watching.names == {name(2), name(3)}
    await watching.stop()
    assert feed.num_watchers == 0


@in_virtual_time
async def test_a_watcher_of_a_worker_that_has_no_status_yet_gets_the_digest_alone() -> None:
    feed = started_feed()
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    assert watching.events == [WatchEvent(0, digest=(0, 0), epoch=EPOCH)]
    await watching.stop()


@in_virtual_time
async def test_a_job_that_has_come_is_in_the_load_at_once_until_a_status_counts_it() -> None:
    feed = started_feed()
    feed.arrived(5, 1, 1)  # before any status there is nothing to add to
    feed.publish_status(status(1))
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    feed.arrived(100, 2, 7)
    feed.arrived(50, 1, 4)
    await asyncio.sleep(0)
    told = watching.events[-1].status
    assert told is not None
    assert (told.num_waiting, told.num_waiting_tokens) == (4, 150)
    assert (told.num_free_blocks, told.num_cached_blocks, told.num_held_blocks) == (0, 0, 10)
    feed.publish_status(status(2))
    await asyncio.sleep(0.1)
    assert watching.events[-1].status == status(2)
    await watching.stop()


@in_virtual_time
async def test_many_events_are_told_in_bounded_messages() -> None:
    feed = started_feed(max_pending_events=10_000)
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    feed.append([stored(number) for number in range(2500)])
    await asyncio.sleep(0.1)
    assert [len(event.events) for event in watching.events] == [0, 512, 512, 512, 512, 452]
    assert watching.names == set(map(name, range(2500)))
    await watching.stop()


@in_virtual_time
async def test_events_say_how_long_they_have_waited() -> None:
    clock = FakeClock()
    feed = Feed(EPOCH, clock=clock)
    feed.start(asyncio.get_running_loop())
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    watching.may_read.clear()
    feed.publish_status(status())
    await asyncio.sleep(0.1)
    feed.append([stored(1)])
    await asyncio.sleep(0.1)
    clock.advance(3.0)
    watching.may_read.set()
    await asyncio.sleep(0.1)
    assert watching.events[-1].age_s == 3.0
    await watching.stop()


@in_virtual_time
async def test_a_page_is_bounded_and_tells_only_what_the_asker_does_not_know() -> None:
    feed = started_feed()
    feed.append([stored(number) for number in range(5000)])
    await asyncio.sleep(0.1)
    pages = pages_of(feed)
    assert all(len(page.hashes) <= MAX_BATCH for page in pages)
    assert len(pages) >= 10
    assert {page.number for page in pages} == {5000}
    assert whole_set(feed) == set(map(name, range(5000)))
    known = [0] * NUM_PARTS
    for number in range(5000):
        known[part_of(name(number))] ^= digest_part(name(number))
    assert feed.page(SnapshotJob(0, NUM_PARTS, tuple(known))) == BlockPage(EPOCH, 5000, 0, NUM_PARTS)
    part = part_of(name(3))
    known[part] ^= digest_part(name(3))
    (page,) = [feed.page(SnapshotJob(0, NUM_PARTS, tuple(known)))]
    assert page.changed == (part,)
    assert name(3) in page.hashes
    assert {part_of(block_hash) for block_hash in page.hashes} == {part}


@in_virtual_time
async def test_a_block_that_moves_to_another_tier_is_news_and_changes_the_digest() -> None:
    feed = started_feed()
    feed.append([stored(1)])
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    on_device = feed.digest
    moved = BlockEvent(BlockEventKind.STORED, name(1), None, BlockTier.HOST)
    feed.append([moved, moved])
    await asyncio.sleep(0.1)
    assert watching.events[-1].events == (moved,)
    assert feed.digest[0] == on_device[0]
    assert feed.digest != on_device
    assert pages_of(feed)[0].tiers == (BlockTier.HOST,)
    feed.append([stored(1)])
    await asyncio.sleep(0.1)
    assert feed.digest == on_device
    await watching.stop()


@in_virtual_time
async def test_what_is_told_before_the_start_is_kept() -> None:
    feed = Feed(EPOCH)
    feed.append([stored(1)])
    feed.publish_status(status())
    feed.start(asyncio.get_running_loop())
    watching = Watching(feed)
    await asyncio.sleep(0.1)
    assert watching.names == {name(1)}
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
    assert feed.digest == digest_of({name(1)})
    await watching.stop()


@in_virtual_time
async def test_a_slow_watcher_loses_its_backlog_and_gets_the_digest_in_its_place() -> None:
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
    assert slow.num_fetches == 2, "the first, and the loss"
    assert quick.num_fetches == 1
    assert slow.names == quick.names == set(map(name, range(50)))
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
    assert watching.names == {name(number) for number in range(5000) if number % 3}
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
            assert watching.names == true_set
            await watching.stop()

    run()


@pytest.mark.parametrize("max_pending", [1, 2])
def test_even_the_smallest_buffer_delivers_the_digest(max_pending: int) -> None:
    @in_virtual_time
    async def run() -> None:
        feed = started_feed(max_pending)
        watching = Watching(feed)
        await asyncio.sleep(0.1)
        assert watching.events[0].digest is not None
        await watching.stop()

    run()
