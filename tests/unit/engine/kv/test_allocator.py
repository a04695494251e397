"""The allocator against a model of who holds what, through random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_hash import BlockHash
from core.worker_status import BlockEvent, BlockEventKind
from engine.kv.allocator import BlockAllocator


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


class EventSet:
    """The set of names as a listener of the events sees it."""

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash | None] = {}

    def __call__(self, events: tuple[BlockEvent, ...]) -> None:
        assert events, "a call without events"
        for event in events:
            if event.kind is BlockEventKind.CLEARED:
                self.parents.clear()
                continue
            assert event.block_hash is not None
            if event.kind is BlockEventKind.STORED:
                assert event.block_hash not in self.parents, "stored twice"
                assert event.parent is None or event.parent in self.parents, "stored before its parent"
                self.parents[event.block_hash] = event.parent
            else:
                del self.parents[event.block_hash]


class AllocatorMachine(RuleBasedStateMachine):
    """Holders are tables of blocks; the content of block i of a table is named by its path of letters."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.events = EventSet()
        self.allocator = BlockAllocator(self.NUM_BLOCKS, self.events)
        self.tables: list[tuple[str, list[int]]] = []  # path so far published, blocks
        self.quarantined: list[int] = []

    @rule(path=st.text("ab", max_size=4), num_extra=st.integers(0, 3))
    def start(self, path: str, num_extra: int) -> None:
        """Take over what is cached of a path and allocate the rest."""
        shared = self.allocator.prefix_cache.match(name(path[: i + 1]) for i in range(len(path)))
        num_new = len(path) - len(shared) + num_extra
        num_free = self.allocator.num_free
        num_usable = self.NUM_BLOCKS - len({b for _, table in self.tables for b in table} | set(shared))
        new = self.allocator.try_acquire(shared, num_new)
        if new is None:
            assert num_new > num_usable - len(self.quarantined)
            assert self.allocator.num_free == num_free, "a refusal changed something"
            return
        assert len(new) == num_new
        assert all(self.allocator.is_writable(block_id) for block_id in new)
        assert not set(new) & set(shared)
        self.tables.append((path[: len(shared)], [*shared, *new]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish_next(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        path, table = self.tables[index]
        if len(path) == len(table):
            return
        path += data.draw(st.sampled_from("ab"))
        parent_block = table[len(path) - 2] if len(path) > 1 else None
        assert self.allocator.publish(table[len(path) - 1], name(path), parent_block)
        assert not self.allocator.is_writable(table[len(path) - 1])
        self.tables[index] = (path, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        path, table = data.draw(st.sampled_from(self.tables))
        length = data.draw(st.integers(0, len(path)))
        self.allocator.hold(table[:length])
        assert not any(self.allocator.is_writable(block_id) for block_id in table[:length])
        self.tables.append((path[:length], table[:length]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def quarantine_tail(self, data: st.DataObject) -> None:
        _, table = data.draw(st.sampled_from(self.tables))
        if table and self.allocator.is_writable(table[-1]):
            self.quarantined.append(table[-1])
            self.allocator.quarantine([table.pop()])

    @precondition(lambda self: self.quarantined)
    @rule()
    def unquarantine(self) -> None:
        self.allocator.unquarantine([self.quarantined.pop()])

    @rule()
    def clear_cache(self) -> None:
        self.allocator.clear_cache()
        assert self.allocator.num_cached == 0

    @invariant()
    def is_consistent(self) -> None:
        tables = [table for _, table in self.tables]
        self.allocator.check(tables)
        assert self.allocator.leak_difference(tables) == 0
        assert self.allocator.num_quarantined == len(self.quarantined)
        assert self.events.parents == dict(self.allocator.prefix_cache.items())
        held_names = {name(path[: i + 1]) for path, _ in self.tables for i in range(len(path))}
        assert held_names <= set(self.events.parents), "a name that is held was forgotten"


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def published_chain(allocator: BlockAllocator, prefix: str, num: int) -> list[int]:
    table = allocator.try_allocate(num)
    assert table is not None
    for i, block_id in enumerate(table):
        allocator.publish(block_id, name(f"{prefix}{i}"), table[i - 1] if i else None)
    return table


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(4)
    table = allocator.try_allocate(3)
    assert table is not None
    assert allocator.try_allocate(2) is None
    assert (allocator.num_free, allocator.num_held) == (1, 3)
    allocator.check([table])


def test_eviction_takes_the_least_recently_used_and_children_before_parents() -> None:
    allocator = BlockAllocator(6)
    old, new = published_chain(allocator, "old", 3), published_chain(allocator, "new", 3)
    allocator.release(old)
    allocator.release(new)
    evicted = []
    for _ in range(6):
        assert allocator.try_allocate(1) is not None
        evicted.append(
            next(n for n in ("old", "new") for i in range(3) if name(f"{n}{i}") not in allocator.prefix_cache)
        )
        present = [[name(f"{n}{i}") in allocator.prefix_cache for i in range(3)] for n in ("old", "new")]
        assert all(row == sorted(row, reverse=True) for row in present), "a parent went before its child"
    assert evicted[:3] == ["old"] * 3


def test_reuse_makes_a_prefix_young_again() -> None:
    allocator = BlockAllocator(6)
    first, second = published_chain(allocator, "a", 3), published_chain(allocator, "b", 3)
    allocator.release(first)
    allocator.release(second)
    assert allocator.try_acquire(first[:2], 0) == []
    allocator.release(first[:2])
    assert allocator.try_allocate(4) is not None
    assert [name(n) in allocator.prefix_cache for n in ("a0", "a1", "a2", "b0", "b1", "b2")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_what_is_shared_is_never_evicted_to_make_room_for_the_rest() -> None:
    allocator = BlockAllocator(4)
    table = published_chain(allocator, "a", 3)
    allocator.release(table)
    assert allocator.try_acquire(table[:2], 3) is None
    assert allocator.num_cached == 3
    new = allocator.try_acquire(table[:2], 2)
    assert new is not None
    assert not set(new) & set(table[:2])
    allocator.check([[*table[:2], *new]])


def test_a_second_copy_is_stored_and_removed_without_an_event() -> None:
    events: list[BlockEvent] = []
    allocator = BlockAllocator(4, events.extend)
    first, second = published_chain(allocator, "a", 1), published_chain(allocator, "a", 1)
    assert [event.kind for event in events] == [BlockEventKind.STORED]
    allocator.release(first)
    assert allocator.lookup(name("a0")) == second[0]
    assert allocator.num_free == 3, "a copy beside a held one is of no use"
    allocator.release(second)
    assert allocator.num_cached == 1
    assert len(events) == 1
    allocator.clear_cache()
    assert [event.kind for event in events[1:]] == [BlockEventKind.REMOVED]


def test_a_copy_that_is_held_takes_the_place_of_the_cached_one() -> None:
    allocator = BlockAllocator(4)
    cached = published_chain(allocator, "a", 1)
    allocator.release(cached)
    held = published_chain(allocator, "a", 1)
    allocator.check([held])
    assert allocator.lookup(name("a0")) == held[0]
    assert (allocator.num_free, allocator.num_cached) == (3, 0)


def test_a_block_with_two_holders_or_none_is_not_writable() -> None:
    allocator = BlockAllocator(4)
    table = allocator.try_allocate(1)
    assert table is not None
    assert allocator.is_writable(table[0])
    allocator.hold(table)
    assert not allocator.is_writable(table[0])
    allocator.release(table)
    assert allocator.is_writable(table[0])
    allocator.release(table)
    assert not allocator.is_writable(table[0])


def test_clearing_several_is_one_event() -> None:
    events: list[BlockEvent] = []
    allocator = BlockAllocator(4, events.extend)
    allocator.release(published_chain(allocator, "a", 3))
    del events[:]
    allocator.clear_cache()
    assert [event.kind for event in events] == [BlockEventKind.CLEARED]


def test_evicting_some_of_many_names_each_of_them() -> None:
    events: list[BlockEvent] = []
    allocator = BlockAllocator(4, events.extend)
    allocator.release(published_chain(allocator, "a", 4))
    del events[:]
    assert allocator.try_allocate(2) is not None
    removed = [(event.kind, event.block_hash) for event in events]
    assert removed == [(BlockEventKind.REMOVED, name("a3")), (BlockEventKind.REMOVED, name("a2"))]


def test_a_chain_matches_only_in_its_own_order() -> None:
    allocator = BlockAllocator(4)
    table = published_chain(allocator, "a", 3)
    match = allocator.prefix_cache.match
    assert match([name("a0"), name("a1"), name("zz"), name("a2")]) == table[:2]
    assert match([name("a0"), name("a2")]) == table[:1]
    assert match([name("a1"), name("a2")]) == []


def test_a_block_whose_parent_has_no_name_is_not_published() -> None:
    allocator = BlockAllocator(4)
    table = allocator.try_allocate(2)
    assert table is not None
    assert not allocator.publish(table[1], name("child"), table[0])
    assert allocator.publish(table[0], name("parent"), None)
    assert allocator.publish(table[1], name("child"), table[0])


def test_a_name_is_not_taken_over_under_another_parent() -> None:
    allocator = BlockAllocator(6)
    published_chain(allocator, "a", 2)
    other = published_chain(allocator, "b", 1) + (allocator.try_allocate(1) or [])
    assert not allocator.publish(other[1], name("a1"), other[0])


@pytest.mark.parametrize("tables", [[[0]], [[0], [0], [1]], [[1]], [[0, 1, 2]], [[0, 1, 9]]])
def test_the_check_sees_each_difference(tables: list[list[int]]) -> None:
    allocator = BlockAllocator(4)
    assert allocator.try_allocate(2) == [0, 1]
    allocator.check([[0], [1]])
    with pytest.raises(AssertionError):
        allocator.check(tables)


def test_leaks_are_counted() -> None:
    allocator = BlockAllocator(4)
    assert allocator.try_allocate(3) == [0, 1, 2]
    assert allocator.leak_difference([[0, 1, 2]]) == 0
    assert allocator.leak_difference([[0]]) == 2
    assert allocator.leak_difference([[0, 1, 2], [0]]) == 1


def test_misuse_is_an_assertion() -> None:
    allocator = BlockAllocator(4)
    table = published_chain(allocator, "a", 1)
    with pytest.raises(AssertionError):
        allocator.release([2])
    with pytest.raises(AssertionError):
        allocator.hold([2])
    with pytest.raises(AssertionError):
        allocator.quarantine(table)
    with pytest.raises(AssertionError):
        allocator.publish(3, name("b"), None)
    with pytest.raises(AssertionError):
        allocator.publish(table[0], name("b"), None)
