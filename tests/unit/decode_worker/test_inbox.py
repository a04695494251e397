"""What the inbox promises to prefill workers, to claimers and to the allocator."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.errors import (
    HandoffError,
    InvalidRequest,
    LayoutMismatch,
    ReservationRefused,
    StaleEpoch,
    TicketExpired,
    TransferCorrupt,
)
from core.handoff import TERMINAL_STATES, HandoffTicket, TicketState
from core.ids import Epoch, TicketId
from decode_worker.config import DecodeConfig
from decode_worker.inbox import Inbox
from engine.kv.cache import KVCache
from engine.sequence import Sequence, new_sequence
from tests.doubles import FakeClock
from tests.unit.decode_worker.decode_cases import (
    DECODE,
    LAYOUT,
    MAX_CONTEXT,
    make_cache,
    make_request,
    make_ticket,
    payload,
)

T = TicketId("t")


class Room:
    """An inbox with its cache, clock and what it reported."""

    def __init__(self, num_blocks: int = 16, **config: float) -> None:
        self.cache: KVCache = make_cache(num_blocks)
        self.clock = FakeClock()
        self.ended: Counter[TicketState] = Counter()
        self.config = DecodeConfig(**config)  # type: ignore[arg-type]
        self.inbox = Inbox(DECODE, self.cache, self.cache.pool, self.config, self.clock, self._on_ended)

    def _on_ended(self, state: TicketState) -> None:
        self.ended[state] += 1

    def check(self, *tables: list[int]) -> None:
        self.cache.allocator.check([*self.inbox.tables(), *tables])

    def offer(self, num_tokens: int = 10, name: str = "t", **changes: int) -> HandoffTicket:
        ticket = make_ticket(self.cache, make_request(num_tokens), name, **changes)
        self.inbox.offer(ticket, 100.0)
        return ticket

    def send(self, ticket: HandoffTicket) -> None:
        """Push all that is missing and commit."""
        held = self.inbox.offer(ticket, 100.0)
        missing = [index for index in range(ticket.num_blocks) if index not in held]
        for index in missing:
            self.inbox.write(ticket.ticket_id, index, 1, payload(1, index))
        self.inbox.commit(ticket.ticket_id, ticket.num_tokens, len(missing))


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


def claim(room: Room, ticket: HandoffTicket) -> Sequence:
    sequence = new_sequence(make_request(ticket.num_tokens), 0, (5,), MAX_CONTEXT)
    room.cache.claim(room.inbox.claim(ticket.ticket_id), [sequence])
    return sequence


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


class InboxMachine(RuleBasedStateMachine):
    """Any messages in any order over a few tickets and a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(num_blocks=12)
        self.requests = {
            TicketId(f"t{index}"): make_request(4 + 3 * index, first=index % 2) for index in range(4)
        }
        self.claimed: dict[TicketId, Sequence] = {}

    tickets = st.sampled_from([TicketId(f"t{index}") for index in range(4)])

    @rule(ticket_id=tickets, growth=st.integers(0, 8))
    def offer(self, ticket_id: TicketId, growth: int) -> None:
        ticket = make_ticket(self.room.cache, self.requests[ticket_id], ticket_id, num_growth_tokens=growth)
        self.attempt(lambda: self.room.inbox.offer(ticket, 30.0))

    @rule(ticket_id=tickets, first=st.integers(0, 3), num=st.integers(1, 3))
    def write(self, ticket_id: TicketId, first: int, num: int) -> None:
        self.attempt(lambda: self.room.inbox.write(ticket_id, first, num, payload(num)))

    @rule(ticket_id=tickets, num_pushed=st.integers(0, 4))
    def commit(self, ticket_id: TicketId, num_pushed: int) -> None:
        num_tokens = self.requests[ticket_id].num_prompt_tokens
        self.attempt(lambda: self.room.inbox.commit(ticket_id, num_tokens, num_pushed))

    @rule(ticket_id=tickets)
    def send_all(self, ticket_id: TicketId) -> None:
        ticket = make_ticket(self.room.cache, self.requests[ticket_id], ticket_id)
        self.attempt(lambda: self.room.send(ticket))

    @rule(ticket_id=tickets)
    def claim(self, ticket_id: TicketId) -> None:
        if self.room.inbox.state(ticket_id) is TicketState.COMMITTED:
            sequence = new_sequence(self.requests[ticket_id], 0, (5,), MAX_CONTEXT)
            self.room.cache.claim(self.room.inbox.claim(ticket_id), [sequence])
            self.claimed[ticket_id] = sequence

    @rule(ticket_id=tickets)
    def finish(self, ticket_id: TicketId) -> None:
        sequence = self.claimed.pop(ticket_id, None)
        if sequence is not None:
            self.room.cache.release(sequence)
            self.room.inbox.release(ticket_id)

    @rule(ticket_id=tickets)
    def abort(self, ticket_id: TicketId) -> None:
        self.room.inbox.abort(ticket_id, 10.0)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.room.clock.advance(seconds)
        self.room.inbox.expire()

    @invariant()
    def blocks_add_up(self) -> None:
        self.room.check(*(sequence.block_table for sequence in self.claimed.values()))

    @invariant()
    def only_live_tickets_hold_blocks(self) -> None:
        states = set(self.room.inbox.num_by_state())
        assert not states & TERMINAL_STATES
        assert TicketState.OFFERED not in states

    def attempt(self, message: Callable[[], object]) -> None:
        with contextlib.suppress(HandoffError):
            message()


TestInboxMachine = InboxMachine.TestCase
TestInboxMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
