"""Any messages to an inbox in any order: blocks add up after each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.errors import HandoffError
from core.handoff import TERMINAL_STATES, TicketState
from core.ids import TicketId
from engine.sequence import Sequence, new_sequence
from tests.unit.decode_worker.decode_cases import MAX_CONTEXT, make_request, make_ticket, payload
from tests.unit.decode_worker.inbox_room import Room


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
