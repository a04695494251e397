"""How tickets end at the inbox: aborted, silent, unclaimed, late; and how many it remembers."""

from __future__ import annotations

import pytest

from core.errors import TicketExpired
from core.handoff import TicketState
from core.ids import TicketId
from tests.unit.decode_worker.decode_cases import payload
from tests.unit.decode_worker.inbox_room import Room, T, claim


def test_an_abort_of_an_unknown_ticket_refuses_its_late_offer_until_the_deadline() -> None:
    room = Room()
    room.inbox.abort(T, 20.0)
    room.clock.advance(19.0)
    room.inbox.expire()
    with pytest.raises(TicketExpired):
        room.offer(10)
    room.clock.advance(2.0)
    room.inbox.expire()
    room.offer(10)
    assert room.ended[TicketState.ABORTED] == 0


def test_a_reservation_lives_while_prefill_is_heard_and_ends_by_silence() -> None:
    room = Room()
    room.offer(10)
    for speak in (lambda: room.inbox.keepalive(T), lambda: room.inbox.write(T, 0, 1, payload(1))):
        room.clock.advance(4.9)
        room.inbox.expire()
        speak()
    room.clock.advance(4.9)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.SENDING
    room.clock.advance(0.1)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.EXPIRED
    assert room.cache.allocator.num_free == 16
    with pytest.raises(TicketExpired):
        room.inbox.keepalive(T)
    room.check()


def test_an_unclaimed_commit_ends_after_its_time_and_its_full_blocks_stay_cached() -> None:
    room = Room()
    room.send(room.offer(10))
    room.clock.advance(1.9)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.COMMITTED
    room.clock.advance(0.1)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.EXPIRED
    assert (room.cache.allocator.num_cached, room.cache.allocator.num_held) == (2, 0)
    room.check()


def test_silence_does_not_end_a_ticket_that_somebody_waits_for_but_its_deadline_does() -> None:
    room = Room()
    room.offer(10)
    room.inbox.expect(T)
    room.clock.advance(50.0)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.RESERVED
    room.clock.advance(50.0)
    room.inbox.expire()
    assert room.inbox.state(T) is TicketState.EXPIRED


def test_a_claimed_ticket_does_not_expire_and_cannot_be_aborted() -> None:
    room = Room()
    ticket = room.offer(10)
    room.send(ticket)
    sequence = claim(room, ticket)
    room.clock.advance(1000.0)
    room.inbox.expire()
    room.inbox.abort(T)
    assert room.inbox.state(T) is TicketState.CLAIMED
    room.check(sequence.block_table)


def test_messages_for_an_ended_ticket_are_refused_and_write_nothing() -> None:
    room = Room()
    ticket = room.offer(10)
    room.inbox.abort(T)
    for late in (
        lambda: room.inbox.write(T, 0, 1, payload(1)),
        lambda: room.inbox.commit(T, 10, 3),
        lambda: room.inbox.keepalive(T),
        lambda: room.inbox.offer(ticket, 100.0),
    ):
        with pytest.raises(TicketExpired):
            late()
    assert bytes(room.cache.pool.read_blocks(range(16))) == payload(16, 0)


def test_the_memory_of_ended_tickets_is_bounded() -> None:
    room = Room(max_tombstones=10)
    for index in range(50):
        room.inbox.abort(TicketId(f"t{index}"), 1000.0)
    assert sum(room.inbox.state(TicketId(f"t{index}")) is not None for index in range(50)) == 10
