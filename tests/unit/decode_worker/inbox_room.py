"""An inbox with what it works on, for its tests."""

from __future__ import annotations

from collections import Counter

from core.handoff import HandoffTicket, TicketState
from core.ids import TicketId
from decode_worker.config import DecodeConfig
from decode_worker.inbox import Inbox
from engine.kv.cache import KVCache
from engine.sequence import Sequence, new_sequence
from tests.doubles import FakeClock
from tests.unit.decode_worker.decode_cases import (
    DECODE,
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


def claim(room: Room, ticket: HandoffTicket) -> Sequence:
    sequence = new_sequence(make_request(ticket.num_tokens), 0, (5,), MAX_CONTEXT)
    room.cache.claim(room.inbox.claim(ticket.ticket_id), [sequence])
    return sequence
