"""Blocks that decode lends are findable after a verified commit and not before; nothing else stays of a
ticket, whatever order its messages come in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.block_hash import BlockHash, hash_blocks, root_hash
from core.errors import HandoffError, InvalidRequest, ReservationRefused, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from prefill_worker.borrowed import Borrowed

LAYOUT = KVLayout("toy", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
SILENCE_S = 5.0
BLOCK = b"\1" * LAYOUT.block_bytes


@dataclass
class Room:
    """The borrowed tickets of a small pool, and what was written to it."""

    num_blocks: int = 8
    written: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        allocator = BlockAllocator(self.num_blocks)
        self.cache = KVCache(KVPool(LAYOUT, self.num_blocks), allocator)
        self.borrowed = Borrowed(WorkerId("p"), self.cache, self, SILENCE_S)

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        if len(payload) != len(block_ids) * LAYOUT.block_bytes:
            raise ValueError("the payload has another length")
        self.written += block_ids

    def check(self) -> None:
        self.cache.allocator.check(self.borrowed.tables())

    def num_found(self, ticket: HandoffTicket) -> int:
        return len(self.cache.match(ticket.block_hashes))


def ticket_of(name: str, num_blocks: int, seed: int = 0, num_tokens: int | None = None) -> HandoffTicket:
    tokens = range(1000 * seed, 1000 * seed + num_blocks * LAYOUT.block_size)
    names: list[BlockHash] = hash_blocks(
        root_hash("", LAYOUT.fingerprint, ""), tuple(tokens), LAYOUT.block_size
    )
    return HandoffTicket(
        ticket_id=TicketId(name),
        request_id=RequestId("r"),
        prefill=WorkerRef(WorkerId("d"), Role.DECODE, Epoch(1), ""),
        decode=WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(2), ""),
        layout=LAYOUT,
        num_tokens=len(tokens) if num_tokens is None else num_tokens,
        block_hashes=tuple(names),
    )


def test_committed_blocks_are_cached_and_nobodys() -> None:
    room, ticket = Room(), ticket_of("t", 3)
    assert room.borrowed.offer(ticket, 30.0, now=0.0) == ()
    room.borrowed.write(ticket.ticket_id, 0, 2, BLOCK * 2, None, now=1.0)
    room.borrowed.write(ticket.ticket_id, 2, 1, BLOCK, None, now=1.0)
    assert room.num_found(ticket) == 0, "not before the commit"
    room.borrowed.commit(ticket.ticket_id, 12, 3, now=2.0)
    assert room.num_found(ticket) == 3
    assert (room.cache.allocator.num_held, room.cache.allocator.num_cached) == (0, 3)
    room.borrowed.commit(ticket.ticket_id, 12, 3, now=2.0)  # the answer was lost
    room.check()
    assert room.borrowed.offer(ticket_of("next", 5), 30.0, now=3.0) == (0, 1, 2), "what is here need not come"
    room.check()


def test_a_repeated_message_changes_nothing() -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.offer(ticket, 30.0, now=0.0)
    assert room.borrowed.offer(ticket, 30.0, now=0.0) == ()
    room.borrowed.write(ticket.ticket_id, 0, 2, BLOCK * 2, None, now=0.0)
    room.borrowed.write(ticket.ticket_id, 0, 2, b"other bytes", None, now=0.0)
    assert len(room.written) == 2
    room.check()


def test_an_abort_before_its_offer_refuses_the_offer() -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.abort(ticket.ticket_id, now=0.0)
    with pytest.raises(TicketExpired):
        room.borrowed.offer(ticket, 30.0, now=1.0)
    assert len(room.borrowed) == 0


@pytest.mark.parametrize(("seconds", "is_over"), [(4.9, False), (5.0, True)])
def test_silence_ends_a_ticket(seconds: float, is_over: bool) -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.offer(ticket, 30.0, now=0.0)
    room.borrowed.keepalive(ticket.ticket_id, now=3.0)
    room.borrowed.expire(3.0 + seconds)
    assert (len(room.borrowed) == 0) == is_over
    if is_over:
        with pytest.raises(TicketExpired):
            room.borrowed.write(ticket.ticket_id, 0, 1, BLOCK, None, now=9.0)
        assert room.cache.allocator.num_free == 8


def test_a_ticket_ends_at_its_deadline_however_much_is_heard() -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.offer(ticket, 2.0, now=0.0)
    room.borrowed.keepalive(ticket.ticket_id, now=1.9)
    room.borrowed.expire(2.0)
    assert len(room.borrowed) == 0


def test_without_room_an_offer_is_refused_whole() -> None:
    room = Room(num_blocks=4)
    room.borrowed.offer(ticket_of("a", 3), 30.0, now=0.0)
    with pytest.raises(ReservationRefused):
        room.borrowed.offer(ticket_of("b", 2, seed=1), 30.0, now=0.0)
    room.check()
    assert room.cache.allocator.num_free == 1


@pytest.mark.parametrize("num_tokens", [7, 9, 0])
def test_only_full_blocks_are_borrowed(num_tokens: int) -> None:
    with pytest.raises(InvalidRequest):
        Room().borrowed.offer(ticket_of("t", 2, num_tokens=num_tokens), 30.0, now=0.0)


@pytest.mark.parametrize(
    ("first", "num", "payload"), [(0, 3, BLOCK * 3), (-1, 1, BLOCK), (0, 1, b"short"), (1, 0, b"")]
)
def test_blocks_that_are_not_the_tickets_end_it(first: int, num: int, payload: bytes) -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.offer(ticket, 30.0, now=0.0)
    with pytest.raises(TransferCorrupt):
        room.borrowed.write(ticket.ticket_id, first, num, payload, None, now=0.0)
    assert len(room.borrowed) == 0
    assert room.cache.allocator.num_free == 8


@pytest.mark.parametrize(("num_tokens", "num_pushed"), [(4, 2), (8, 1), (8, 3)])
def test_a_commit_of_something_else_ends_the_ticket_and_publishes_nothing(
    num_tokens: int, num_pushed: int
) -> None:
    room, ticket = Room(), ticket_of("t", 2)
    room.borrowed.offer(ticket, 30.0, now=0.0)
    room.borrowed.write(ticket.ticket_id, 0, 2, BLOCK * 2, None, now=0.0)
    with pytest.raises(TransferCorrupt):
        room.borrowed.commit(ticket.ticket_id, num_tokens, num_pushed, now=0.0)
    assert room.num_found(ticket) == 0
    room.check()


class AnyOrder(RuleBasedStateMachine):
    """Messages of a few tickets in any order: each block has its holders, and what is found was committed."""

    tickets = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(num_blocks=7)
        self.now = 0.0

    def _ticket(self, number: int) -> HandoffTicket:
        return ticket_of(f"t{number}", 2 + number % 2, seed=number // 2)

    @rule(number=tickets)
    def offer(self, number: int) -> None:
        self._try(lambda: self.room.borrowed.offer(self._ticket(number), 8.0, self.now))

    @rule(number=tickets, index=st.integers(0, 2))
    def write(self, number: int, index: int) -> None:
        name = self._ticket(number).ticket_id
        self._try(lambda: self.room.borrowed.write(name, index, 1, BLOCK, None, self.now))

    @rule(number=tickets, num=st.integers(0, 3))
    def commit(self, number: int, num: int) -> None:
        ticket = self._ticket(number)
        self._try(lambda: self.room.borrowed.commit(ticket.ticket_id, ticket.num_tokens, num, self.now))

    @rule(number=tickets)
    def abort(self, number: int) -> None:
        self.room.borrowed.abort(self._ticket(number).ticket_id, self.now)

    @rule(seconds=st.floats(0.0, 6.0))
    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.room.borrowed.expire(self.now)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (HandoffError, InvalidRequest):
            return

    @invariant()
    def each_block_has_its_holders(self) -> None:
        self.room.check()

    def teardown(self) -> None:
        self.room.borrowed.expire(self.now + 100.0)
        assert self.room.cache.allocator.num_held == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
