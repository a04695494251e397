"""Mailbox: what happens on the step thread, told on the IO loop.

Owns nothing but the way: each message is put into the loop's queue, in order, and the step thread goes on.
"""

from __future__ import annotations

import asyncio

from core.errors import ServingError
from core.handoff import HandoffTicket
from core.ids import TicketId
from core.jobs import PrefillResult
from prefill_worker.loop import PromptListener
from prefill_worker.prompt import Prompt


class Mailbox:
    """A PromptListener for the step thread; `reader` gets the same messages on the loop given to `open`."""

    def __init__(self, reader: PromptListener) -> None:
        self._reader = reader
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on `loop`; called before the step thread starts."""
        self._loop = loop

    def started(self, prompt: Prompt, ticket: HandoffTicket) -> None:
        self._io.call_soon_threadsafe(self._reader.started, prompt, ticket)

    def blocks_ready(self, prompt: Prompt, first_index: int, block_ids: tuple[int, ...]) -> None:
        self._io.call_soon_threadsafe(self._reader.blocks_ready, prompt, first_index, block_ids)

    def computed(self, prompt: Prompt, result: PrefillResult, is_finished: bool) -> None:
        self._io.call_soon_threadsafe(self._reader.computed, prompt, result, is_finished)

    def failed(self, prompt: Prompt, error: ServingError) -> None:
        self._io.call_soon_threadsafe(self._reader.failed, prompt, error)

    def expired(self, ticket_id: TicketId) -> None:
        self._io.call_soon_threadsafe(self._reader.expired, ticket_id)

    @property
    def _io(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the mailbox is opened before the step thread starts"
        return self._loop
