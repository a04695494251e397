"""The index follows each worker's set of blocks, and notices when it does not."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHash
from core.ids import WorkerId
from core.jobs import BlockSnapshot, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind
from router.prefix_index import OutOfStep, PrefixIndex, digest_part

A, B = WorkerId("a"), WorkerId("b")


def _hash(number: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(bytes([number]), digest_size=16).digest())


def _digest(hashes: set[BlockHash]) -> tuple[int, int]:
    xor = 0
    for block_hash in hashes:
        xor ^= digest_part(block_hash)
    return len(hashes), xor


def _snapshot(*numbers: int, at: int = 0) -> WatchEvent:
    hashes = tuple(map(_hash, numbers))
    return WatchEvent(at, snapshot=BlockSnapshot(hashes, (None,) * len(hashes)), digest=_digest(set(hashes)))


def _changes(at: int, *changes: tuple[BlockEventKind, int | None]) -> WatchEvent:
    events = [BlockEvent(kind, None if number is None else _hash(number)) for kind, number in changes]
    return WatchEvent(at, events=tuple(events))


def _chain(length: int) -> list[BlockHash]:
    return [_hash(number) for number in range(length)]


def test_the_longest_prefix_without_a_hole_counts_for_each_worker() -> None:
    index = PrefixIndex()
    index.apply(A, _snapshot(0, 1, 3))
    index.apply(B, _snapshot(0, 1, 2, 3))
    assert index.match(_chain(5)) == {A: 2, B: 4}
    assert index.match(_chain(5)[1:]) == {A: 1, B: 3}
    assert index.match([_hash(9)]) == {}
    assert index.match([]) == {}


def test_changes_are_followed() -> None:
    index = PrefixIndex()
    index.apply(A, _snapshot(0))
    index.apply(A, _changes(2, (BlockEventKind.STORED, 1), (BlockEventKind.STORED, 2)))
    assert index.match(_chain(4)) == {A: 3}
    index.apply(A, _changes(3, (BlockEventKind.REMOVED, 1)))
    assert index.match(_chain(4)) == {A: 1}
    index.apply(A, _changes(4, (BlockEventKind.CLEARED, None)))
    assert index.match(_chain(4)) == {}
    assert index.num_blocks(A) == 0


def test_a_gap_in_the_numbers_is_out_of_step_and_a_snapshot_mends_it() -> None:
    index = PrefixIndex()
    index.apply(A, _snapshot(0, at=7))
    with pytest.raises(OutOfStep):
        index.apply(A, _changes(9, (BlockEventKind.STORED, 1)))
    index.apply(A, _snapshot(0, 1, 2, at=12))
    index.apply(A, _changes(13, (BlockEventKind.STORED, 3)))
    assert index.match(_chain(4)) == {A: 4}


def test_a_wrong_digest_or_number_is_out_of_step() -> None:
    index = PrefixIndex()
    index.apply(A, _snapshot(0, 1))
    index.apply(A, WatchEvent(0, digest=_digest({_hash(0), _hash(1)})))
    with pytest.raises(OutOfStep):
        index.apply(A, WatchEvent(0, digest=_digest({_hash(0)})))
    with pytest.raises(OutOfStep):
        index.apply(A, WatchEvent(1, digest=_digest({_hash(0), _hash(1)})))


def test_a_change_before_any_snapshot_is_out_of_step() -> None:
    with pytest.raises(OutOfStep):
        PrefixIndex().apply(A, _changes(1, (BlockEventKind.STORED, 1)))


def test_a_forgotten_worker_holds_nothing() -> None:
    index = PrefixIndex()
    index.apply(A, _snapshot(0, 1))
    index.apply(B, _snapshot(0))
    index.forget(A)
    index.forget(A)
    assert index.match(_chain(2)) == {B: 1}


_steps = st.lists(st.tuples(st.sampled_from([A, B]), st.booleans(), st.integers(0, 5)), max_size=40)


@given(_steps)
def test_whatever_the_changes_the_digest_of_the_truth_fits(steps: list[tuple[WorkerId, bool, int]]) -> None:
    index = PrefixIndex()
    truth: dict[WorkerId, set[BlockHash]] = {A: set(), B: set()}
    numbers = {A: 0, B: 0}
    for worker in truth:
        index.apply(worker, _snapshot())
    for worker, is_stored, number in steps:
        kind = BlockEventKind.STORED if is_stored else BlockEventKind.REMOVED
        (truth[worker].add if is_stored else truth[worker].discard)(_hash(number))
        numbers[worker] += 1
        index.apply(worker, _changes(numbers[worker], (kind, number)))
        index.apply(worker, WatchEvent(numbers[worker], digest=_digest(truth[worker])))
    for worker, held in truth.items():
        length = next((i for i in range(7) if _hash(i) not in held), 7)
        assert index.match(_chain(7)).get(worker, 0) == length
