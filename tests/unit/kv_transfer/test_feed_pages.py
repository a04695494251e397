"""A feed tells its set in bounded pages, and no more of it than the asker lacks."""

from __future__ import annotations

import asyncio

from core.block_hash import NUM_PARTS, digest_part, part_of
from core.jobs import BlockPage, SnapshotJob
from core.worker_status import BlockEvent, BlockEventKind, BlockTier
from kv_transfer.feed import MAX_BATCH
from tests.unit.kv_transfer.doubles import in_virtual_time
from tests.unit.kv_transfer.watching import (
    EPOCH,
    Watching,
    name,
    pages_of,
    started_feed,
    stored,
    whole_set,
)


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
