"""Pushes and commits: what lies in the blocks, what is findable, what ends the ticket."""

from __future__ import annotations

import pytest

from core.errors import TicketExpired, TransferCorrupt
from core.handoff import TicketState
from core.ids import TicketId
from tests.unit.decode_worker.decode_cases import payload
from tests.unit.decode_worker.inbox_room import Room, T, claim


def test_repeated_messages_change_nothing() -> None:
    room = Room()
    ticket = room.offer(10)
    assert room.inbox.offer(ticket, 100.0) == ()
    for _ in range(2):
        room.inbox.write(T, 0, 2, payload(2))
    room.inbox.write(T, 2, 1, payload(1))
    for _ in range(2):
        room.inbox.commit(T, 10, 3)
    room.inbox.write(T, 1, 1, payload(1, 99))  # late and repeated: acknowledged, not written
    assert room.inbox.state(T) is TicketState.COMMITTED
    block_id = room.cache.match(ticket.block_hashes)[1]
    assert bytes(room.cache.pool.read_blocks([block_id])) == payload(1)
    for _ in range(2):
        room.inbox.abort(T)
    assert room.ended == {TicketState.ABORTED: 1}
    room.check()


def test_pushed_bytes_lie_in_the_blocks_of_the_claiming_sequence_in_order() -> None:
    room = Room()
    ticket = room.offer(10)
    for index in (2, 0, 1):
        room.inbox.write(T, index, 1, payload(1, 10 + index))
    room.inbox.commit(T, 10, 3)
    sequence = claim(room, ticket)
    content = bytes(room.cache.pool.read_blocks(sequence.block_table[:3]))
    assert content == payload(1, 10) + payload(1, 11) + payload(1, 12)
    assert sequence.num_computed_tokens == 10
    assert room.inbox.state(T) is TicketState.CLAIMED
    room.check(sequence.block_table)
    room.cache.release(sequence)
    room.inbox.release(T)
    assert room.ended == {TicketState.RELEASED: 1}
    room.check()


def test_full_blocks_become_findable_at_the_commit_and_not_before() -> None:
    room = Room()
    ticket = room.offer(10)
    room.inbox.write(T, 0, 3, payload(3))
    assert room.cache.match(ticket.block_hashes) == []
    room.inbox.commit(T, 10, 3)
    assert len(room.cache.match(ticket.block_hashes)) == 2


@pytest.mark.parametrize(("num_tokens", "num_pushed"), [(10, 2), (9, 3), (10, 4)])
def test_a_commit_whose_numbers_disagree_aborts_and_publishes_nothing(
    num_tokens: int, num_pushed: int
) -> None:
    room = Room()
    ticket = room.offer(10)
    room.inbox.write(T, 0, 3, payload(3))
    with pytest.raises(TransferCorrupt):
        room.inbox.commit(T, num_tokens, num_pushed)
    assert room.inbox.state(T) is TicketState.ABORTED
    assert room.cache.match(ticket.block_hashes) == []
    assert room.cache.allocator.num_held == 0
    room.check()


def test_a_commit_with_a_block_missing_aborts() -> None:
    room = Room()
    room.offer(10)
    room.inbox.write(T, 0, 2, payload(2))
    with pytest.raises(TransferCorrupt):
        room.inbox.commit(T, 10, 3)


@pytest.mark.parametrize(("first_index", "num_blocks"), [(2, 2), (3, 1), (-1, 1), (0, 0), (0, 9)])
def test_a_push_outside_the_ticket_aborts_it(first_index: int, num_blocks: int) -> None:
    room = Room()
    room.offer(10)
    with pytest.raises(TransferCorrupt):
        room.inbox.write(T, first_index, num_blocks, payload(max(0, num_blocks)))
    assert room.inbox.state(T) is TicketState.ABORTED
    room.check()


def test_a_push_into_a_held_block_aborts_the_ticket_and_leaves_the_block_alone() -> None:
    room = Room()
    first = room.offer(10, "first")
    room.send(first)
    before = bytes(room.cache.pool.read_blocks(room.cache.match(first.block_hashes)))
    room.offer(10, "second")
    with pytest.raises(TransferCorrupt):
        room.inbox.write(TicketId("second"), 1, 2, payload(2, 99))
    assert bytes(room.cache.pool.read_blocks(room.cache.match(first.block_hashes))) == before
    room.check()


def test_a_push_of_the_wrong_size_aborts() -> None:
    room = Room()
    room.offer(10)
    with pytest.raises(TransferCorrupt):
        room.inbox.write(T, 0, 2, payload(1))
    room.check()


class Check:
    """A WriteCheck with a given answer."""

    def __init__(self, is_right: bool) -> None:
        self.is_right = is_right
        self.seen = bytearray()

    def observe(self, piece: memoryview) -> None:
        self.seen += piece


def test_a_payload_that_could_still_change_is_judged_by_what_lies_in_the_blocks() -> None:
    room = Room()
    room.offer(10)
    check = Check(is_right=True)
    room.inbox.write(T, 0, 2, payload(2), check)
    assert check.seen == payload(2)
    again = Check(is_right=False)
    room.inbox.write(T, 0, 2, payload(2, 99), again)
    assert not again.seen, "written blocks are neither written nor read again"
    room.inbox.write(T, 2, 1, payload(1))
    room.inbox.commit(T, 10, 3)
    room.check()


def test_blocks_that_are_not_what_was_sent_abort_the_ticket_and_are_never_findable() -> None:
    room = Room()
    ticket = room.offer(10)
    room.inbox.write(T, 0, 1, payload(1))
    with pytest.raises(TransferCorrupt):
        room.inbox.write(T, 1, 1, payload(1, 1), Check(is_right=False))
    with pytest.raises(TicketExpired):
        room.inbox.commit(T, 10, 3)
    assert not room.cache.match(ticket.block_hashes)
    assert room.ended == {TicketState.ABORTED: 1}
    room.check()
