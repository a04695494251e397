"""HandoffTicket: the claim that moves a sequence from prefill to decode, and the automaton of its states.

The only place where the transitions are written down; prefill's outbox and decode's inbox both advance
through `next_state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.block_hash import BlockHash
from core.ids import RequestId, TicketId, WorkerRef
from core.kv_layout import KVLayout


class TicketState(StrEnum):
    OFFERED = "offered"
    RESERVED = "reserved"
    SENDING = "sending"
    COMMITTED = "committed"
    CLAIMED = "claimed"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"


_NEXT: dict[TicketState, frozenset[TicketState]] = {
    TicketState.OFFERED: frozenset({TicketState.RESERVED, TicketState.ABORTED, TicketState.EXPIRED}),
    TicketState.RESERVED: frozenset(
        {TicketState.SENDING, TicketState.COMMITTED, TicketState.ABORTED, TicketState.EXPIRED}
    ),
    TicketState.SENDING: frozenset({TicketState.COMMITTED, TicketState.ABORTED, TicketState.EXPIRED}),
    TicketState.COMMITTED: frozenset({TicketState.CLAIMED, TicketState.ABORTED, TicketState.EXPIRED}),
    TicketState.CLAIMED: frozenset({TicketState.RELEASED}),
    TicketState.RELEASED: frozenset(),
    TicketState.ABORTED: frozenset(),
    TicketState.EXPIRED: frozenset(),
}

TERMINAL_STATES = frozenset({TicketState.RELEASED, TicketState.ABORTED, TicketState.EXPIRED})


def may_follow(state: TicketState, following: TicketState) -> bool:
    """Whether the automaton allows `state → following`."""
    return following in _NEXT[state]


def next_state(state: TicketState, following: TicketState) -> TicketState:
    """`following`,

    Or AssertionError: a forbidden transition is a bug of ours, messages are filtered before.
    """
    assert may_follow(state, following), f"ticket may not go {state} → {following}"
    return following


@dataclass(frozen=True, slots=True)
class HandoffTicket:
    """What prefill offers to decode: full blocks by hash, the tail by length, and room to grow.

    `num_tokens` counts the prompt tokens whose KV will be sent. `block_hashes` has one entry for each full
    block. Block i of the ticket is named (ticket_id, i); the tail, if any, is the last index. `num_samples`
    sequences will claim it. `num_growth_tokens` is how many output tokens decode should make room for at
    once.
    """

    ticket_id: TicketId
    request_id: RequestId
    prefill: WorkerRef
    decode: WorkerRef
    layout: KVLayout
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]
    num_samples: int = 1
    num_growth_tokens: int = 0
    is_prefix_cache_read: bool = True

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks(self.num_tokens)
