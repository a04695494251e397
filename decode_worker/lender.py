"""Lender: sends cached blocks to prefill workers that ask for them through the router.

Owns the transfers under way. It takes prefill's part on the bridge: offer, push, commit, with the same
fences and checks; a transfer that fails or is not wanted any more is aborted at the other end. Lives on the
IO loop; the blocks are held on the step thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from core.clock import Clock, Deadline
from core.errors import InvalidRequest
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef
from core.jobs import LendJob, LendResult
from core.kv_layout import KVLayout
from kv_transfer.sender import Sender
from kv_transfer.session import SendSession


class Vault(Protocol):
    """Where the blocks are, on the step thread."""

    async def begin_loan(self, job: LendJob) -> tuple[int, ...]:
        """Hold the blocks of the job's cached prefix."""
        ...

    def end_loan(self, ticket_id: TicketId) -> None:
        """Let go of them, if they are held; also those of a `begin_loan` whose caller has gone."""
        ...


class Lender:
    """Used while the worker serves. `close` at the end."""

    def __init__(
        self, sender: Sender, own_ref: WorkerRef, layout: KVLayout, clock: Clock, vault: Vault
    ) -> None:
        self._sender = sender
        self._own_ref = own_ref
        self._layout = layout
        self._clock = clock
        self._vault = vault
        self._lent: set[TicketId] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def lend(self, job: LendJob) -> LendResult:
        """Send what is cached here of the job's blocks; cancelling the call ends the transfer.

        Raises InvalidRequest, or why the transfer failed: what the other end refused with, WorkerLost,
        TransferTimeout.
        """
        if job.ticket_id in self._lent:
            raise InvalidRequest("the ticket id is in use", param="ticket_id")
        deadline = Deadline.after(job.time_left_s, self._clock)
        session: SendSession | None = None
        self._lent.add(job.ticket_id)
        try:
            block_ids = await self._vault.begin_loan(job)
            if not block_ids:
                return LendResult(0, 0)
            ticket = self._ticket(job, len(block_ids))
            session = self._sender.open(ticket, deadline)
            session.add_blocks(0, block_ids)
            receipt = await session.finish(ticket.num_tokens)
            return LendResult(ticket.num_tokens, receipt.num_pushed_blocks)
        finally:
            self._end(job.ticket_id, session)

    async def close(self) -> None:
        """Abort what is under way."""
        await self._sender.close()
        await asyncio.gather(*self._ends, return_exceptions=True)

    # ------------------------------------------------------------ inside

    def _ticket(self, job: LendJob, num_blocks: int) -> HandoffTicket:
        return HandoffTicket(
            ticket_id=job.ticket_id,
            request_id=job.request_id,
            prefill=self._own_ref,
            decode=job.to,
            layout=self._layout,
            num_tokens=num_blocks * self._layout.block_size,
            block_hashes=job.block_hashes[:num_blocks],
        )

    def _end(self, ticket_id: TicketId, session: SendSession | None) -> None:
        """Whoever is cancelled cannot wait; the blocks are let go of when nobody reads them any more."""
        if session is None:
            self._vault.end_loan(ticket_id)
            self._lent.discard(ticket_id)
            return
        task = asyncio.get_running_loop().create_task(self._settle(ticket_id, session))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _settle(self, ticket_id: TicketId, session: SendSession) -> None:
        aborting: Awaitable[None] | None = None
        if not session.has_ended:
            # telling the other end may take a while if it cannot be reached; the blocks need not wait for it
            aborting = asyncio.ensure_future(session.abort("the loan is not wanted any more"))
        try:
            await session.ended()
        finally:
            self._vault.end_loan(ticket_id)
            self._lent.discard(ticket_id)
        if aborting is not None:
            await aborting
