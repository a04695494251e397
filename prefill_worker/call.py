"""PrefillCall: one Prefill call on the IO loop: its reply, and the handoff that may outlive it.

Owns the order of events between the first token and the ticket: the reply goes out when the tokens are
sampled and the offer was granted; the commit comes after. Knows no blocks' contents and no scheduler: it
reports to the step thread through two callables.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from core.errors import HandoffError, ServingError
from core.handoff import HandoffTicket, TicketState
from core.ids import TicketId
from core.jobs import PrefillResult
from kv_transfer.session import SendSession
from prefill_worker.prompt import Prompt

_log = logging.getLogger(__name__)

OnGranted = Callable[[TicketId], None]
OnClosed = Callable[[TicketId, TicketState], None]


class PrefillCall:
    """A call from its admission until its reply and its ticket have ended. Lives on the IO loop."""

    def __init__(self, prompt: Prompt, on_granted: OnGranted, on_closed: OnClosed) -> None:
        self.prompt = prompt
        self.reply: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self.handoff: asyncio.Task[None] | None = None
        self._on_granted = on_granted
        self._on_closed = on_closed
        self._session: SendSession | None = None
        self._computed: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._result: PrefillResult | None = None
        self._is_granted = False
        self._is_handing_over = False
        self._stop_reason: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stop_reason is not None

    @property
    def has_ended(self) -> bool:
        return self.reply.done() and (self.handoff is None or self.handoff.done())

    def start_handoff(self, ticket: HandoffTicket, session: SendSession) -> asyncio.Task[None]:
        """Offer the ticket. The task reports when nobody reads its blocks any more, and ends after that."""
        self._session = session
        self.handoff = asyncio.get_running_loop().create_task(
            self._hand_over(ticket, session), name=f"handoff {ticket.ticket_id}"
        )
        return self.handoff

    def add_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        """Blocks of the ticket that may be sent."""
        if self._session is not None and not self.is_stopped:
            self._session.add_blocks(first_index, block_ids)

    def set_computed(self, result: PrefillResult, is_finished: bool) -> None:
        """The first tokens are there; `is_finished`: the ticket is not wanted any more."""
        self._result = result
        if self.handoff is None or is_finished:
            self._answer(result)
            self.stop("finished at the first token")
            return
        if not self._computed.done():
            began_at = self.prompt.started_at
            self._computed.set_result(None if began_at is None else began_at + result.compute_s)
        self._answer_if_granted()

    def fail(self, error: ServingError) -> None:
        """End the call with `error`, and its ticket."""
        if not self.reply.done():
            self.reply.set_exception(error)
        self.stop(error.code)

    def stop(self, reason: str) -> None:
        """Abort the ticket, if it has not ended. The reply stays as it is. Safe to call twice."""
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        # a task that is cancelled before its first step would never report
        if self.handoff is not None and self._is_handing_over:
            self.handoff.cancel()

    async def _hand_over(self, ticket: HandoffTicket, session: SendSession) -> None:
        self._is_handing_over = True
        reason = "the handoff was stopped"
        try:
            await self._commit_when_computed(ticket, session)
        except asyncio.CancelledError:
            # only `stop` cancels this task, and only once: it is ours to swallow
            reason = self._stop_reason or reason
        except ServingError as error:
            reason = error.code
            self._give_up(ticket, error)
        except Exception as error:  # noqa: BLE001 (logged, and told to the caller)
            _log.exception("handoff of ticket %s failed", ticket.ticket_id)
            self._give_up(ticket, HandoffError(f"the handoff failed ({type(error).__name__})"))
        else:
            self._is_handing_over = False
            self._on_closed(ticket.ticket_id, TicketState.COMMITTED)
            return
        self._is_handing_over = False
        telling = asyncio.get_running_loop().create_task(session.abort(reason))
        # telling decode may take a while if it cannot be reached; the blocks need not wait for that
        await session.ended()
        self._on_closed(ticket.ticket_id, TicketState.ABORTED)
        await telling

    async def _commit_when_computed(self, ticket: HandoffTicket, session: SendSession) -> None:
        if self.is_stopped:
            raise asyncio.CancelledError
        await session.offered()
        self._on_granted(ticket.ticket_id)
        self._is_granted = True
        self._answer_if_granted()
        async with _watching(session) as failing:
            await asyncio.wait((self._computed, failing), return_when=asyncio.FIRST_COMPLETED)
        if not self._computed.done() and session.error is not None:
            raise session.error
        await session.finish(self.prompt.sequence.num_tokens, await self._computed)

    def _give_up(self, ticket: HandoffTicket, error: ServingError) -> None:
        self._stop_reason = self._stop_reason or error.code
        if self.reply.done():
            # the first token is a fact already: decode, told by the abort, prefills by itself
            _log.warning("ticket %s was not committed: %s: %s", ticket.ticket_id, error.code, error.message)
        else:
            self.reply.set_exception(error)

    def _answer_if_granted(self) -> None:
        if self._is_granted and self._result is not None:
            self._answer(self._result)

    def _answer(self, result: PrefillResult) -> None:
        if not self.reply.done():
            self.reply.set_result(result)


@asynccontextmanager
async def _watching(session: SendSession) -> AsyncIterator[asyncio.Task[ServingError | None]]:
    """A task that ends when the session does."""
    task = asyncio.get_running_loop().create_task(session.ended())
    try:
        yield task
    finally:
        task.cancel()
