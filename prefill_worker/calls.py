"""Calls: all Prefill calls of this worker that have not ended, and what reaches them from the step thread.

Owns which prompt belongs to which call. A call stays until its reply is out and its ticket closed. Everything
here runs on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from core.block_hash import BlockHash, hash_blocks, root_hash
from core.clock import Deadline
from core.errors import ServingError
from core.handoff import HandoffTicket, TicketState
from core.ids import TicketId
from core.jobs import CancelJob, PrefillResult
from core.kv_layout import KVLayout
from kv_transfer.sender import Sender
from prefill_worker.call import OnClosed, OnGranted, PrefillCall
from prefill_worker.prompt import Prompt


class Calls:
    """The calls under way, by prompt; a PromptListener on the IO loop.

    `on_granted` and `on_closed` tell the step thread about tickets; every ticket that was started is closed
    exactly once, also when its call has gone.
    """

    def __init__(self, sender: Sender, on_granted: OnGranted, on_closed: OnClosed) -> None:
        self._sender = sender
        self._on_granted = on_granted
        self._on_closed = on_closed
        self._calls: dict[Prompt, PrefillCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, prompt: Prompt) -> PrefillCall:
        """A call for a prompt that is about to be admitted."""
        call = PrefillCall(prompt, self._on_granted, self._on_closed)
        self._calls[prompt] = call
        self._idle.clear()
        call.reply.add_done_callback(lambda reply: self._forget_if_ended(call))
        return call

    def matching(self, job: CancelJob) -> list[PrefillCall]:
        """The calls that `job` means: that of its ticket, or without a ticket all of its request.

        A single sample is not stopped here: its first token is drawn with those of the others.
        """
        if job.sample_index is not None:
            return []
        return [
            call
            for call in self
            if call.prompt.job.request.request_id == job.request_id
            and (job.ticket_id is None or call.prompt.job.ticket_id == job.ticket_id)
        ]

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all calls ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def __iter__(self) -> Iterator[PrefillCall]:
        return iter(tuple(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    # ------------------------------------------------------------ from the step thread

    def started(self, prompt: Prompt, ticket: HandoffTicket) -> None:
        call = self._calls.get(prompt)
        if call is None or call.is_stopped:
            self._on_closed(ticket.ticket_id, TicketState.ABORTED)
            return
        try:
            names = partial(_names, prompt, ticket.num_tokens)
            session = self._sender.open(ticket, Deadline(prompt.deadline_at), names)
        except ServingError as error:
            call.fail(error)
            self._on_closed(ticket.ticket_id, TicketState.ABORTED)
            return
        handoff = call.start_handoff(ticket, session)
        handoff.add_done_callback(lambda done: self._forget_if_ended(call))

    def blocks_ready(self, prompt: Prompt, first_index: int, block_ids: tuple[int, ...]) -> None:
        if (call := self._calls.get(prompt)) is not None:
            call.add_blocks(first_index, block_ids)

    def computed(self, prompt: Prompt, result: PrefillResult, is_finished: bool) -> None:
        if (call := self._calls.get(prompt)) is not None:
            call.set_computed(result, is_finished)

    def failed(self, prompt: Prompt, error: ServingError) -> None:
        if (call := self._calls.get(prompt)) is not None:
            call.fail(error)

    def expired(self, ticket_id: TicketId) -> None:
        for call in self:
            if call.prompt.job.ticket_id == ticket_id:
                call.stop("expired")

    def _forget_if_ended(self, call: PrefillCall) -> None:
        if call.has_ended:
            self._calls.pop(call.prompt, None)
            if not self._calls:
                self._idle.set()


def _names(prompt: Prompt, num_tokens: int, layout: KVLayout) -> tuple[BlockHash, ...]:
    """What a worker with blocks of `layout` calls the prompt's full blocks."""
    request = prompt.job.request
    root = root_hash(request.cache_salt, layout.fingerprint, request.adapter)
    return tuple(hash_blocks(root, prompt.sequence.token_ids[:num_tokens], layout.block_size))
