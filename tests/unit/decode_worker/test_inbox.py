"""Offers: what the inbox reserves, pins and refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import InvalidRequest, LayoutMismatch, ReservationRefused, StaleEpoch
from core.handoff import TicketState
from core.ids import Epoch, TicketId
from tests.unit.decode_worker.decode_cases import DECODE, LAYOUT, make_request, make_ticket
from tests.unit.decode_worker.inbox_room import Room


def test_an_offer_reserves_the_prompt_and_room_to_grow_and_nothing_is_findable_yet() -> None:
    room = Room()
    room.offer(10, num_growth_tokens=8)
    assert room.cache.allocator.num_held == 5  # 18 tokens in blocks of 4
    assert room.cache.allocator.num_cached == 0
    assert room.inbox.num_by_state() == {TicketState.RESERVED: 1}
    assert room.inbox.num_reserved_samples == 1
    room.check()


def test_each_sample_gets_a_tail_and_room_of_its_own() -> None:
    room = Room()
    ticket = make_ticket(room.cache, make_request(10, num_samples=3), num_growth_tokens=4)
    room.inbox.offer(ticket, 100.0)
    assert room.cache.allocator.num_held == 2 + 3 * 2
    assert room.inbox.num_reserved_samples == 3


def test_an_offer_is_refused_whole_when_there_is_no_room_and_leaves_nothing_behind() -> None:
    room = Room(num_blocks=4)
    ticket = make_ticket(room.cache, make_request(14), num_growth_tokens=4)
    with pytest.raises(ReservationRefused):
        room.inbox.offer(ticket, 100.0)
    assert room.cache.allocator.num_held == 0
    assert room.ended == {TicketState.ABORTED: 1}
    room.check()
    room.inbox.offer(replace(ticket, num_growth_tokens=0), 100.0)


def test_an_offer_is_refused_when_no_place_is_left_for_its_samples() -> None:
    room = Room()
    ticket = make_ticket(room.cache, make_request(10, num_samples=2))
    with pytest.raises(ReservationRefused):
        room.inbox.offer(ticket, 100.0, max_samples=1)
    assert len(room.inbox.offer(ticket, 100.0, max_samples=2)) == 0


def test_blocks_held_here_are_named_in_the_answer_and_pinned_until_the_end() -> None:
    room = Room(num_blocks=6)
    room.send(room.offer(10, "first"))
    room.inbox.abort(TicketId("first"))
    assert room.cache.allocator.num_cached == 2
    ticket = make_ticket(room.cache, make_request(10), "second", num_growth_tokens=0)
    assert room.inbox.offer(ticket, 100.0) == (0, 1)
    assert room.cache.allocator.num_cached == 0
    assert room.cache.allocator.try_allocate(4) is None, "a pinned block was evicted"
    room.inbox.abort(ticket.ticket_id)
    assert room.cache.allocator.num_cached == 2
    room.check()


def test_a_request_that_does_not_read_the_cache_gets_no_held_blocks() -> None:
    room = Room()
    room.send(room.offer(10, "first"))
    request = replace(make_request(10), is_prefix_cache_read=False)
    assert room.inbox.offer(make_ticket(room.cache, request, "second"), 100.0) == ()


def test_another_layout_is_refused_by_the_names_of_what_differs() -> None:
    room = Room()
    ticket = make_ticket(room.cache, make_request(10), layout=replace(LAYOUT, num_layers=3, dtype="float16"))
    with pytest.raises(LayoutMismatch, match=r"num_layers: 1 vs 3.*dtype: float32 vs float16") as caught:
        room.inbox.offer(ticket, 100.0)
    assert caught.value.details == {"decode": "d", "prefill": "p"}


def test_a_ticket_for_another_incarnation_is_refused() -> None:
    room = Room()
    ticket = make_ticket(room.cache, make_request(10))
    with pytest.raises(StaleEpoch):
        room.inbox.offer(replace(ticket, decode=replace(DECODE, epoch=Epoch(99))), 100.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0, "block_hashes": ()},
        {"num_samples": 0},
        {"block_hashes": ()},
        {"num_growth_tokens": -1},
    ],
)
def test_a_ticket_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    room = Room()
    ticket = make_ticket(room.cache, make_request(10))
    with pytest.raises(InvalidRequest):
        room.inbox.offer(replace(ticket, **changes), 100.0)  # type: ignore[arg-type]
    room.check()
