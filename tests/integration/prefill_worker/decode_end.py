"""A decode worker's end of the bridge that keeps the bytes, to judge a prefill worker's pushes by."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from core.errors import ServingError, TicketExpired
from core.handoff import HandoffTicket
from core.ids import RequestId, TicketId
from kv_transfer.transport import Payload, WriteCheck


class Arrival:
    """One offered ticket and what came of it."""

    def __init__(self, ticket: HandoffTicket, held: tuple[int, ...]) -> None:
        self.ticket = ticket
        self.held = held
        self.blocks: dict[int, bytes] = {}
        self.num_tokens: int | None = None
        self.abort_reason: str | None = None
        self.ended = asyncio.Event()

    @property
    def is_committed(self) -> bool:
        return self.num_tokens is not None

    def kv(self) -> npt.NDArray[np.float32]:
        """What was pushed, as `[num_layers, 2, num_kv_heads, num_tokens, head_dim]`; every block must be
        here.
        """
        shape = self.ticket.layout.block_shape
        blocks = [
            np.frombuffer(self.blocks[index], np.float32).reshape(shape)
            for index in range(self.ticket.num_blocks)
        ]
        return np.concatenate(blocks, axis=3)[:, :, :, : self.ticket.num_tokens]


class DecodeEnd:
    """A ReservationPort without a pool: answers offers, stores verified payloads, remembers how tickets
    ended.

    `refusal` is raised at each offer, `commit_error` at each commit, of the requests `refused` and `corrupt`
    (None: of all); offers wait for `door`. Full blocks of committed tickets are held for later ones, as a
    prefix cache would.
    """

    def __init__(self) -> None:
        self.arrivals: dict[TicketId, Arrival] = {}
        self.offers: list[HandoffTicket] = []
        self.door = asyncio.Event()
        self.door.set()
        self.first_write = asyncio.Event()
        self.refusal: ServingError | None = None
        self.refused: Container[RequestId] | None = None
        self.commit_error: ServingError | None = None
        self.corrupt: Container[RequestId] | None = None
        self.tombstones: dict[TicketId, str] = {}
        self._known: dict[bytes, bytes] = {}

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        self.offers.append(ticket)
        await self.door.wait()
        if ticket.ticket_id in self.tombstones:
            raise TicketExpired("the ticket was aborted")
        if self.refusal is not None and _is_meant(ticket, self.refused):
            raise self.refusal
        held = self._prefix(ticket.block_hashes) if ticket.is_prefix_cache_read else ()
        arrival = Arrival(ticket, held)
        arrival.blocks.update({index: self._known[ticket.block_hashes[index]] for index in held})
        self.arrivals[ticket.ticket_id] = arrival
        return held

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        assert check is None, "only payloads that travel in their frames are expected here"
        assert isinstance(payload, memoryview)
        arrival = self.arrivals[ticket_id]
        size = arrival.ticket.layout.block_bytes
        for offset in range(num_blocks):
            assert first_index + offset not in arrival.blocks, "a block came twice"
            arrival.blocks[first_index + offset] = bytes(payload[offset * size : (offset + 1) * size])
        self.first_write.set()

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        arrival = self.arrivals[ticket_id]
        if self.commit_error is not None and _is_meant(arrival.ticket, self.corrupt):
            raise self.commit_error
        arrival.num_tokens = num_tokens
        for index, name in enumerate(arrival.ticket.block_hashes):
            self._known[name] = arrival.blocks[index]
        arrival.ended.set()

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        self.tombstones[ticket_id] = reason
        arrival = self.arrivals.get(ticket_id)
        if arrival is not None and not arrival.is_committed:
            arrival.abort_reason = reason
            arrival.ended.set()

    async def keepalive(self, ticket_id: TicketId) -> None:
        if ticket_id not in self.arrivals:
            raise TicketExpired("no such ticket")

    def _prefix(self, names: Sequence[bytes]) -> tuple[int, ...]:
        count = 0
        while count < len(names) and names[count] in self._known:
            count += 1
        return tuple(range(count))


def _is_meant(ticket: HandoffTicket, requests: Container[RequestId] | None) -> bool:
    return requests is None or ticket.request_id in requests
