"""PoolPort: decode's end of the bridge over a real pool, for measurements that need no scheduler.

A ReservationPort whose copies run on a step thread, as a worker's do. One ticket has the pool at a time: the
next offer ends it. Nothing expires by time. Lives on the IO loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from core.errors import ReservationRefused, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import TicketId
from engine.kv.pool import KVPool
from engine.step_thread import StepThread
from kv_transfer.transport import Payload, WriteCheck


class PoolPort:
    """`block_ids` are those of `pool` that tickets get, in the order of their blocks."""

    def __init__(self, pool: KVPool, block_ids: Sequence[int]) -> None:
        self._pool = pool
        self._block_ids = block_ids
        self._tables: dict[TicketId, Sequence[int]] = {}
        self._thread = StepThread("step", lambda: False, lambda: None)
        self._thread.start()

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        if ticket.num_blocks > len(self._block_ids):
            raise ReservationRefused("no room", num_free=len(self._block_ids))
        self._tables = {ticket.ticket_id: self._block_ids[: ticket.num_blocks]}
        return ()

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        block_ids = self.table(ticket_id)[first_index : first_index + num_blocks]
        if not isinstance(payload, memoryview):
            await self._thread.call(partial(payload.write_to, block_ids))
            return
        observe = None if check is None else check.observe
        await self._thread.call(partial(self._pool.write_blocks, block_ids, payload, observe))
        if check is not None and not check.is_right:
            raise TransferCorrupt("what arrived does not match its checksum", ticket_id=ticket_id)

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        await self._thread.call(partial(self.table, ticket_id))

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        self._tables.pop(ticket_id, None)

    async def keepalive(self, ticket_id: TicketId) -> None:
        self.table(ticket_id)

    def table(self, ticket_id: TicketId) -> Sequence[int]:
        """The blocks of the ticket that has the pool; TicketExpired for another one."""
        if ticket_id not in self._tables:
            raise TicketExpired("another ticket came", ticket_id=ticket_id)
        return self._tables[ticket_id]

    async def read(self, ticket_id: TicketId) -> memoryview:
        """The bytes of the ticket's blocks, in its order, as they lie in the pool."""
        return await self._thread.call(partial(self._pool.read_blocks, self.table(ticket_id)))

    def close(self) -> None:
        self._thread.stop()
