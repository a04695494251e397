"""Who watches can always rebuild the exact set of blocks, or knows that it must ask for its pages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.jobs import WatchEvent
from core.worker_status import BlockEvent, BlockEventKind
from kv_transfer.feed import Feed
from tests.doubles import FakeClock
from tests.unit.kv_transfer.doubles import in_virtual_time, quick, until
from tests.unit.kv_transfer.watching import (
    CLEARED,
    EPOCH,
    Watching,
    digest_of,
    name,
    removed,
    started_feed,
    status,
    stored,
)


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
