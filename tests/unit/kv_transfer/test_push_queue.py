"""Each block that decode lacks arrives exactly once as far as decode can tell, whatever breaks in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.push_queue import BlockRun, PushQueue
from tests.unit.kv_transfer.doubles import quick


def queue(num_blocks: int, frame_blocks: int = 4, window_blocks: int = 8) -> PushQueue:
    return PushQueue(num_blocks, 100, frame_blocks * 100, window_blocks * 100)


def drain(pushes: PushQueue) -> list[BlockRun]:
    runs = []
    while (run := pushes.next_run()) is not None:
        runs.append(run)
    return runs


def test_nothing_is_sent_before_the_offer_is_answered() -> None:
    pushes = queue(4)
    pushes.add(0, [10, 11, 12, 13])
    assert pushes.next_run() is None
    pushes.hold(())
    assert pushes.next_run() == BlockRun(0, (10, 11, 12, 13))


def test_held_blocks_are_never_sent_whether_added_before_or_after_the_answer() -> None:
    pushes = queue(6)
    pushes.add(0, [10, 11, 12])
    pushes.hold((1, 4))
    pushes.add(3, [13, 14, 15])
    assert drain(pushes) == [BlockRun(0, (10,)), BlockRun(2, (12, 13)), BlockRun(5, (15,))]
    assert pushes.is_complete


def test_consecutive_blocks_are_packed_up_to_the_frame_size() -> None:
    pushes = queue(10, frame_blocks=3, window_blocks=100)
    pushes.hold(())
    pushes.add(0, range(10))
    assert [run.num_blocks for run in drain(pushes)] == [3, 3, 3, 1]


def test_the_window_bounds_what_is_in_flight_and_opens_with_acknowledgements() -> None:
    pushes = queue(20, frame_blocks=4, window_blocks=6)
    pushes.hold(())
    pushes.add(0, range(20))
    assert [run.num_blocks for run in drain(pushes)] == [4, 2]
    assert pushes.acknowledge(0, 4)
    assert [run.first_index for run in drain(pushes)] == [6]


def test_a_block_larger_than_the_window_still_travels() -> None:
    pushes = PushQueue(2, 1000, 10, 10)
    pushes.hold(())
    pushes.add(0, [5, 6])
    assert pushes.next_run() == BlockRun(0, (5,))
    assert pushes.next_run() is None
    pushes.acknowledge(0, 1)
    assert pushes.next_run() == BlockRun(1, (6,))


def test_after_a_broken_stream_unacknowledged_runs_come_first_with_the_same_borders() -> None:
    pushes = queue(12)
    pushes.hold(())
    pushes.add(0, range(8))
    runs = drain(pushes)
    pushes.acknowledge(0, 4)
    pushes.add(8, range(8, 12))
    pushes.rewind()
    assert pushes.next_run() == runs[1]
    assert pushes.next_run() == BlockRun(8, (8, 9, 10, 11))


def test_a_repeated_or_unknown_acknowledgement_counts_nothing() -> None:
    pushes = queue(4)
    pushes.hold(())
    pushes.add(0, range(4))
    pushes.next_run()
    assert pushes.acknowledge(0, 4)
    assert not pushes.acknowledge(0, 4)
    assert not pushes.acknowledge(2, 1)
    assert pushes.num_pushed_blocks == 4


def test_a_leased_block_that_changed_between_two_sendings_is_a_bug_that_asserts() -> None:
    pushes = queue(4)
    pushes.hold(())
    pushes.add(0, range(4))
    run = pushes.next_run()
    assert run is not None
    pushes.sent(run, 17)
    with pytest.raises(AssertionError, match="changed"):
        pushes.sent(run, 18)


@quick
@given(
    st.integers(1, 40),
    st.sets(st.integers(0, 39)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_each_missing_block_arrives_once_under_any_order_of_chunks_breaks_and_acknowledgements(
    num_blocks: int, held: set[int], frame_blocks: int, window_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    held = {index for index in held if index < num_blocks}
    pushes = queue(num_blocks, frame_blocks, window_blocks)
    added = 0
    answer_at = rng.randint(0, num_blocks)
    in_flight: list[BlockRun] = []
    written: dict[int, int] = {}
    borders: dict[int, int] = {}
    is_answered = False
    for _ in range(10_000):
        if not is_answered and added >= answer_at:
            pushes.hold(held)
            is_answered = True
        choice = rng.random()
        if choice < 0.3 and added < num_blocks:
            count = rng.randint(1, num_blocks - added)
            pushes.add(added, [1000 + index for index in range(added, added + count)])
            added += count
        elif choice < 0.4:
            pushes.rewind()
            in_flight.clear()
        elif choice < 0.7 and in_flight:
            run = in_flight.pop(0)
            for position, block_id in enumerate(run.block_ids):
                assert written.setdefault(run.first_index + position, block_id) == block_id
            assert pushes.acknowledge(run.first_index, run.num_blocks)
        elif (run := pushes.next_run()) is not None:
            assert borders.setdefault(run.first_index, run.num_blocks) == run.num_blocks
            pushes.sent(run, hash(run))
            in_flight.append(run)
            assert sum(run.num_blocks for run in in_flight) <= max(window_blocks, 1)
        if is_answered and added == num_blocks and pushes.is_empty:
            break
    missing = set(range(num_blocks)) - held
    assert pushes.is_empty
    assert pushes.is_complete
    assert written == {index: 1000 + index for index in missing}
    assert pushes.num_pushed_blocks == len(missing)
    assert sum(borders.values()) == len(missing)


def test_a_run_that_is_sent_again_another_way_counts_with_its_last_checksum() -> None:
    queue = PushQueue(2, 10, 10, 100)
    queue.hold(())
    queue.add(0, (5, 6))
    first, second = queue.next_run(), queue.next_run()
    assert first is not None
    assert second is not None
    queue.sent(first, 0b01, is_on_device=True)
    queue.sent(second, 0b10, is_on_device=True)
    assert queue.checksum == 0b11
    queue.rewind()
    queue.sent(first, 0b100)
    assert queue.checksum == 0b110
    with pytest.raises(AssertionError, match="changed"):
        queue.sent(first, 0b101)
    with pytest.raises(AssertionError, match="changed"):
        queue.sent(second, 0b11, is_on_device=True)
