"""What the outbox promises of leases and tickets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from core.errors import Cancelled, InvalidRequest
from core.handoff import HandoffTicket, TicketState
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from engine.kv.allocator import BlockAllocator
from prefill_worker.outbox import ENDED_STATES, Outbox
from tests.unit.prefill_worker.prompts import DECODE, LAYOUT

PREFILL = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "loopback:p")
DEADLINE_S = 100.0


def make_ticket(name: str, num_tokens: int = 10) -> HandoffTicket:
    return HandoffTicket(TicketId(name), RequestId(name), PREFILL, DECODE, LAYOUT, num_tokens, ())


def allocate(allocator: BlockAllocator, num: int) -> list[int]:
    blocks = allocator.try_allocate(num)
    assert blocks is not None
    return blocks


def test_leased_blocks_outlive_the_sequence_and_go_back_when_nobody_reads_them() -> None:
    allocator = BlockAllocator(8)
    outbox = Outbox(allocator)
    ticket = make_ticket("t")
    blocks = allocate(allocator, 3)
    outbox.open(ticket, DEADLINE_S)
    outbox.grant(ticket.ticket_id)
    assert outbox.state(ticket.ticket_id) is TicketState.RESERVED
    outbox.add_blocks(ticket.ticket_id, blocks[:2])
    assert outbox.state(ticket.ticket_id) is TicketState.SENDING
    outbox.add_blocks(ticket.ticket_id, blocks[2:], is_last=True)
    allocator.release(blocks)
    assert allocator.num_held == 3
    allocator.check(outbox.tables())
    assert outbox.end(ticket.ticket_id, TicketState.COMMITTED)
    assert allocator.num_held == 3
    outbox.close(ticket.ticket_id, now=3.0)
    assert allocator.num_held == 0
    assert outbox.num_ended[TicketState.COMMITTED] == 1


def test_ends_and_closings_may_come_twice_or_for_unknown_tickets() -> None:
    allocator = BlockAllocator(8)
    outbox = Outbox(allocator)
    ticket = make_ticket("t")
    outbox.open(ticket, DEADLINE_S)
    outbox.add_blocks(ticket.ticket_id, allocate(allocator, 1))
    assert outbox.end(ticket.ticket_id, TicketState.ABORTED)
    assert not outbox.end(ticket.ticket_id, TicketState.ABORTED)
    assert not outbox.end(ticket.ticket_id, TicketState.COMMITTED)
    outbox.grant(ticket.ticket_id)
    assert outbox.state(ticket.ticket_id) is TicketState.ABORTED
    for _ in range(2):
        outbox.close(ticket.ticket_id, now=3.0)
    assert not outbox.end(TicketId("unknown"), TicketState.ABORTED)
    assert allocator.num_holders(0) == 1, "the sequence's own hold is untouched"
    assert outbox.num_ended == {TicketState.ABORTED: 1}


def test_a_ticket_is_granted_after_its_first_blocks_were_leased() -> None:
    allocator = BlockAllocator(8)
    outbox = Outbox(allocator)
    ticket = make_ticket("t")
    outbox.open(ticket, DEADLINE_S)
    outbox.add_blocks(ticket.ticket_id, allocate(allocator, 1))
    assert outbox.state(ticket.ticket_id) is TicketState.OFFERED
    outbox.grant(ticket.ticket_id)
    assert outbox.state(ticket.ticket_id) is TicketState.SENDING


def test_a_ticket_expires_at_its_deadline_and_once() -> None:
    outbox = Outbox(BlockAllocator(8))
    ticket = make_ticket("t")
    outbox.open(ticket, DEADLINE_S)
    assert outbox.expire(now=99.9) == []
    assert outbox.expire(now=100.0) == ["t"]
    assert outbox.expire(now=100.0) == []
    assert outbox.state(ticket.ticket_id) is TicketState.EXPIRED


def test_expired_blocks_stay_held_until_their_reading_is_closed() -> None:
    allocator = BlockAllocator(8)
    outbox = Outbox(allocator)
    ticket = make_ticket("t", num_tokens=4)
    blocks = allocate(allocator, 1)
    outbox.open(ticket, DEADLINE_S)
    outbox.add_blocks(ticket.ticket_id, blocks, is_last=True)
    allocator.release(blocks)
    assert outbox.expire(now=DEADLINE_S) == ["t"]
    assert outbox.has_ended(ticket.ticket_id)
    assert allocator.num_held == 1
    outbox.close(ticket.ticket_id, now=DEADLINE_S)
    assert allocator.num_held == 0


def test_a_ticket_id_is_used_once_and_forgotten_after_its_time() -> None:
    outbox = Outbox(BlockAllocator(8), memory_s=60.0)
    ticket_id = TicketId("t")
    outbox.check_new(ticket_id, now=0.0)
    outbox.open(make_ticket("t"), deadline_at=10.0)
    with pytest.raises(InvalidRequest):
        outbox.check_new(ticket_id, now=0.0)
    outbox.end(ticket_id, TicketState.ABORTED)
    outbox.close(ticket_id, now=5.0)
    outbox.expire(now=64.0)
    with pytest.raises(InvalidRequest):
        outbox.check_new(ticket_id, now=64.0)
    outbox.expire(now=65.0)
    outbox.check_new(ticket_id, now=65.0)


def test_a_prefill_whose_cancellation_overtook_it_is_refused_as_cancelled() -> None:
    outbox = Outbox(BlockAllocator(8))
    outbox.remember(TicketId("t"), until=10.0, is_cancelled=True)
    with pytest.raises(Cancelled):
        outbox.check_new(TicketId("t"), now=5.0)
    outbox.expire(now=10.0)
    outbox.check_new(TicketId("t"), now=10.0)


class OutboxMachine(RuleBasedStateMachine):
    """Any order of messages, repeated and late ones too: each count equals what sequences and leases list."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(40)
        self.outbox = Outbox(self.allocator)
        self.sequences: dict[TicketId, list[int]] = {}
        self.num_leased: dict[TicketId, int] = {}
        self.now = 0.0
        self.num_opened = 0

    @rule(target=tickets, num_blocks=st.integers(1, 5))
    def open(self, num_blocks: int) -> TicketId:
        ticket = make_ticket(f"t{self.num_opened}", num_tokens=num_blocks * LAYOUT.block_size)
        self.num_opened += 1
        blocks = self.allocator.try_allocate(num_blocks)
        if blocks is not None:
            self.outbox.open(ticket, self.now + DEADLINE_S)
            self.sequences[ticket.ticket_id] = blocks
            self.num_leased[ticket.ticket_id] = 0
        return ticket.ticket_id

    @rule(ticket_id=tickets)
    def grant(self, ticket_id: TicketId) -> None:
        self.outbox.grant(ticket_id)

    @rule(ticket_id=tickets)
    def compute_a_block(self, ticket_id: TicketId) -> None:
        blocks = self.sequences.get(ticket_id)
        if blocks is None or self.outbox.has_ended(ticket_id):
            return
        start = self.num_leased[ticket_id]
        is_last = start + 1 == len(blocks)
        self.outbox.add_blocks(ticket_id, blocks[start : start + 1], is_last)
        self.num_leased[ticket_id] += 1
        if is_last:
            self.allocator.release(self.sequences.pop(ticket_id))

    @rule(ticket_id=tickets)
    def cancel_the_sequence(self, ticket_id: TicketId) -> None:
        blocks = self.sequences.pop(ticket_id, None)
        if blocks is not None:
            self.allocator.release(blocks)

    @rule(ticket_id=tickets, state=st.sampled_from([TicketState.COMMITTED, TicketState.ABORTED]))
    def end_and_close(self, ticket_id: TicketId, state: TicketState) -> None:
        ended = self.outbox.end(ticket_id, state)
        if ended or self.outbox.has_ended(ticket_id):
            self.outbox.close(ticket_id, self.now)

    @rule(seconds=st.floats(0.1, 30.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for ticket_id in self.outbox.expire(self.now):
            self.outbox.close(ticket_id, self.now)

    @invariant()
    def counts_are_the_sum_over_the_holders(self) -> None:
        self.allocator.check([*self.sequences.values(), *self.outbox.tables()])
        states = self.outbox.num_by_state()
        assert sum(states.values()) == len(self.outbox)
        assert set(self.outbox.num_ended) <= set(ENDED_STATES)

    def teardown(self) -> None:
        self.now += 1000.0
        for ticket_id in self.outbox.expire(self.now):
            self.outbox.close(ticket_id, self.now)
        for blocks in self.sequences.values():
            self.allocator.release(blocks)
        assert len(self.outbox) == 0
        assert self.allocator.num_held == 0


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
