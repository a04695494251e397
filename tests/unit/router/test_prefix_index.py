"""The index says who holds how much of a prompt, notices when it is wrong, and mends that piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from core.ids import Epoch, WorkerId
from core.jobs import BlockPage, WatchEvent
from core.worker_status import BlockTier
from router.block_view import Doubt
from router.prefix_index import Overlap, PrefixIndex
from tests.doubles import FakeClock
from tests.unit.router.told_worker import (
    CLEARED,
    IndexSite,
    ToldWorker,
    block,
    deliver,
    removed,
    repair,
    stored,
    view_of,
)

CHAIN = [block(part * 37, part) for part in range(8)]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def site(loop: asyncio.AbstractEventLoop) -> Iterator[IndexSite]:
    site = IndexSite(loop)
    yield site
    site.end()


def test_the_longest_prefix_without_a_hole_counts_for_each_worker(site: IndexSite) -> None:
    site.a.tell(*map(stored, (CHAIN[0], CHAIN[1], CHAIN[3])))
    site.b.tell(*map(stored, CHAIN[:4]))
    deliver(site.index, site.a)
    deliver(site.index, site.b)
    assert site.index.match(CHAIN) == {"a": 2, "b": 4}
    assert site.index.match(CHAIN[1:]) == {"a": 1, "b": 3}
    assert site.index.match(CHAIN[5:]) == {}
    assert site.index.match([]) == {}


def test_a_block_whose_parent_comes_later_counts_from_then_on(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[1]), stored(CHAIN[2]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {}
    site.a.tell(stored(CHAIN[0]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 3}


def test_changes_are_followed_and_clearing_forgets_all_at_once(site: IndexSite) -> None:
    site.a.tell(*map(stored, CHAIN[:3]))
    site.b.tell(*map(stored, CHAIN[:2]))
    deliver(site.index, site.a)
    deliver(site.index, site.b)
    site.a.tell(removed(CHAIN[1]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 1, "b": 2}
    site.a.tell(CLEARED, stored(CHAIN[0]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 1, "b": 2}
    assert site.index.num_blocks(site.a.worker_id) == 1
    while site.index.clear_some():
        pass
    assert site.index.match(CHAIN) == {"a": 1, "b": 2}
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 1.0


def test_what_was_cleared_away_leaves_nothing_behind(site: IndexSite) -> None:
    site.a.tell(*map(stored, CHAIN))
    deliver(site.index, site.a)
    site.index.forget(site.a.worker_id)
    assert site.index.match(CHAIN) == {}
    assert len(site.index._holders) == len(CHAIN)
    while site.index.clear_some():
        pass
    assert len(site.index._holders) == 0
    assert site.index.confidence(site.a.worker_id) == 0.0


def test_a_gap_is_noticed_and_only_that_worker_is_asked_for_what_differs(site: IndexSite) -> None:
    for worker in (site.a, site.b):
        worker.tell(*map(stored, CHAIN[:4]))
        deliver(site.index, worker)
    site.a.tell(stored(CHAIN[4]))
    site.a.take()  # lost
    site.a.tell(stored(CHAIN[5]))
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 5 / 6, "one of six blocks can be wrong"
    assert site.index.confidence(site.b.worker_id) == 1.0
    assert site.index.match(CHAIN) == {"a": 4, "b": 4}, "the old view stays"
    assert site.index.ask(site.b.worker_id) is None
    job = site.index.ask(site.a.worker_id)
    assert job is not None
    page = site.a.page(job)
    assert page.hashes == (CHAIN[4],), "only what is missing is told"
    for _ in site.index.fill(site.a.worker_id, job, page):
        pass
    repair(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 6, "b": 4}
    assert site.index.confidence(site.a.worker_id) == 1.0
    assert site.index.tally.num_repairs == {Doubt.JOINED: 0, Doubt.GAP: 1, Doubt.DIGEST: 0}


def test_a_wrong_digest_is_noticed_and_mended(site: IndexSite) -> None:
    site.a.tell(*map(stored, CHAIN[:4]))
    for event in site.a.take():
        wrong = WatchEvent(event.number, events=(*event.events[:3], removed(CHAIN[0])), epoch=event.epoch)
        site.index.apply(site.a.worker_id, wrong)
    assert site.index.match(CHAIN) == {}
    site.a.report()
    deliver(site.index, site.a)
    (view, _) = site.index.views()
    assert view.doubt is Doubt.DIGEST
    assert view.drift == 2
    assert site.index.tally.num_mismatches == 1
    repair(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 4}


def test_trust_in_a_stale_view_fades_and_grows_with_its_repair(site: IndexSite) -> None:
    names = [block(part, part) for part in range(4000)]
    site.a.tell(*map(stored, names))
    for event in site.a.take():
        others = tuple(removed(names[0]) for _ in event.events)
        site.index.apply(site.a.worker_id, WatchEvent(event.number, events=others, epoch=event.epoch))
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 0.5
    site.clock.advance(40.0)
    assert site.index.confidence(site.a.worker_id) == pytest.approx(0.5 / 16)
    trusts = []
    while (job := site.index.ask(site.a.worker_id)) is not None:
        for _ in site.index.fill(site.a.worker_id, job, site.a.page(job)):
            pass
        trusts.append(site.index.confidence(site.a.worker_id))
    assert trusts == sorted(trusts)
    assert 0.1 < trusts[0] < 0.15
    assert trusts[-1] == 1.0


def test_once_the_stream_has_ended_a_view_with_a_gap_fades_like_any_other(site: IndexSite) -> None:
    site.a.tell(*map(stored, CHAIN[:6]))
    deliver(site.index, site.a)
    site.a.tell(stored(CHAIN[6]))
    site.a.take()  # lost
    site.a.tell(stored(CHAIN[7]))
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 7 / 8
    site.clock.advance(40.0)
    assert site.index.confidence(site.a.worker_id) == 7 / 8, "what came since was heard"
    site.index.cut(site.a.worker_id)
    assert site.index.confidence(site.a.worker_id) == 0.5
    site.clock.advance(10.0)
    assert site.index.confidence(site.a.worker_id) == 0.25


def test_events_that_come_twice_or_too_late_change_nothing(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]))
    first = site.a.take()
    site.a.tell(removed(CHAIN[0]))
    second = site.a.take()
    deliver(site.index, site.a, [*first, *second, *first])
    assert site.index.match(CHAIN) == {}
    assert site.index.tally.num_ignored == 1
    assert site.index.confidence(site.a.worker_id) == 1.0


def test_events_that_come_while_pages_are_fetched_are_applied_by_number(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]), stored(CHAIN[1]))
    site.a.take()
    site.a.report()
    deliver(site.index, site.a)
    job = site.index.ask(site.a.worker_id)
    assert job is not None
    older = site.a.page(job)
    site.a.tell(removed(CHAIN[1]), stored(CHAIN[2]))
    deliver(site.index, site.a)  # they overtake the page
    for _ in site.index.fill(site.a.worker_id, job, older):
        pass
    assert site.index.ask(site.a.worker_id) is None
    assert view_of(site.index, site.a, CHAIN) == {CHAIN[0], CHAIN[2]}
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 1.0


def test_a_page_that_is_ahead_of_the_events_is_not_undone_by_them(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]))
    site.a.take()
    site.a.report()
    deliver(site.index, site.a)
    site.a.tell(stored(CHAIN[1]))
    site.a.tell(removed(CHAIN[1]))
    late = site.a.take()
    repair(site.index, site.a)
    deliver(site.index, site.a, late[:1])
    assert view_of(site.index, site.a, CHAIN) == {CHAIN[0]}
    deliver(site.index, site.a, late[1:])
    site.a.report()
    deliver(site.index, site.a)
    assert view_of(site.index, site.a, CHAIN) == {CHAIN[0]}
    assert site.index.confidence(site.a.worker_id) == 1.0


def test_a_part_that_changed_while_its_page_was_on_the_way_is_fetched_once_more(site: IndexSite) -> None:
    first, second, third = (block(700, number) for number in range(3))
    site.a.tell(stored(first))
    site.a.take()
    site.a.report()
    deliver(site.index, site.a)
    repair(site.index, site.a)
    site.a.tell(stored(CHAIN[7]))
    site.a.take()  # lost
    site.a.report()
    deliver(site.index, site.a)
    job = site.index.ask(site.a.worker_id)
    assert job is not None
    site.a.tell(stored(second))
    early = site.a.take()
    site.a.tell(stored(third), removed(second), removed(third))
    late = site.a.take()
    page = site.a.page(job)
    assert 700 not in page.changed, "what the asker knew is true again"
    deliver(site.index, site.a, early)
    for _ in site.index.fill(site.a.worker_id, job, page):
        pass
    pages = []
    while (job := site.index.ask(site.a.worker_id)) is not None:
        pages.append(job)
        for _ in site.index.fill(site.a.worker_id, job, site.a.page(job)):
            pass
    assert (pages[-1].first_part, pages[-1].end_part) == (700, 701)
    deliver(site.index, site.a, late)
    assert view_of(site.index, site.a, [first, second, third]) == {first}
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 1.0
    assert site.index.tally.num_mismatches == 0


def test_events_that_a_page_has_told_already_are_no_loss(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]))
    site.a.take()
    site.a.report()
    deliver(site.index, site.a)
    site.a.tell(stored(CHAIN[1]))
    site.a.take()  # lost, but the pages hold it
    repair(site.index, site.a)
    site.a.tell(stored(CHAIN[2]))
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) == 1.0
    assert site.index.match(CHAIN) == {"a": 3}


def test_a_former_incarnation_says_nothing_any_more(site: IndexSite, loop: asyncio.AbstractEventLoop) -> None:
    site.a.tell(stored(CHAIN[0]))
    late = site.a.take()
    job = None
    new = ToldWorker("a", 9, loop)
    site.index.join(new.worker_id, new.epoch)
    deliver(site.index, new)
    deliver(site.index, site.a, late)
    assert site.index.match(CHAIN) == {}
    new.tell(stored(CHAIN[1]))
    new.take()
    new.report()
    deliver(site.index, new)
    job = site.index.ask(new.worker_id)
    assert job is not None
    for _ in site.index.fill(new.worker_id, job, BlockPage(Epoch(1), 99, 0, 4096, (), ())):
        pass
    assert site.index.match(CHAIN[1:]) == {}
    repair(site.index, new)
    assert site.index.match(CHAIN[1:]) == {"a": 1}
    new.end()


def test_a_worker_that_numbers_anew_is_followed(site: IndexSite) -> None:
    site.a.tell(*map(stored, CHAIN[:3]), removed(CHAIN[2]))
    deliver(site.index, site.a)
    site.index.cut(site.a.worker_id)
    assert site.index.confidence(site.a.worker_id) < 1
    site.a.number_anew()
    site.index.join(site.a.worker_id, site.a.epoch)
    deliver(site.index, site.a, site.a.watch())
    assert site.index.confidence(site.a.worker_id) == 1.0, "the same set needs no fetch"
    site.a.tell(stored(CHAIN[2]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 3}


def test_no_worker_takes_more_memory_than_it_may(loop: asyncio.AbstractEventLoop) -> None:
    index, worker = PrefixIndex(FakeClock()), ToldWorker("a", 1, loop)
    index.join(worker.worker_id, worker.epoch, max_blocks=5)
    deliver(index, worker)
    worker.tell(*map(stored, CHAIN))
    worker.report()
    deliver(index, worker)
    assert index.num_blocks(worker.worker_id) == 5
    repair(index, worker)
    assert index.num_blocks(worker.worker_id) == 5
    worker.end()


def test_tiers_are_told_apart(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]), stored(CHAIN[1], BlockTier.HOST), stored(CHAIN[2]))
    deliver(site.index, site.a)
    assert site.index.overlaps(CHAIN) == {"a": Overlap(3, 3, 1, 1.0)}
    site.a.tell(stored(CHAIN[0], BlockTier.DISK), stored(CHAIN[1]), removed(CHAIN[2]))
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.overlaps(CHAIN) == {"a": Overlap(2, 2, 1, 1.0)}
    site.a.tell(stored(CHAIN[1], BlockTier.HOST))
    site.a.take()
    site.a.report()
    deliver(site.index, site.a)
    assert site.index.confidence(site.a.worker_id) < 1, "a move that was lost shows in the digest"
    repair(site.index, site.a)
    assert site.index.overlaps(CHAIN)[WorkerId("a")].num_lower == 2
