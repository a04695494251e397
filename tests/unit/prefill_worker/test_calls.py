"""Every ticket that is started is closed once, in whatever order calls and messages end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from core.clock import MonotonicClock
from core.errors import Cancelled, ServingError
from core.handoff import HandoffTicket, TicketState
from core.ids import Epoch, Role, TicketId, WorkerId, WorkerRef, new_ticket_id
from core.jobs import CancelJob, PrefillResult
from core.request import FinishReason, TokenDelta
from kv_transfer.config import BridgeConfig
from kv_transfer.loopback import LoopbackDirectory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from prefill_worker.call import PrefillCall
from prefill_worker.calls import Calls
from prefill_worker.prompt import Prompt
from tests.unit.prefill_worker.prompts import DECODE, make_cache, make_prompt

PREFILL = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "loopback:p")
RESULT = PrefillResult((TokenDelta(0, 0, (5,)),), num_cached_tokens=0, queue_s=0.0, compute_s=0.0)


class Desk:
    """Calls whose decode worker cannot be reached, and what they report to the step thread."""

    def __init__(self) -> None:
        self.granted: list[TicketId] = []
        self.closed: list[tuple[TicketId, TicketState]] = []
        bridge = BridgeConfig(keepalive_s=0.01, silence_s=0.02, abort_s=0.02)
        pool = make_cache(8).pool
        metrics = TransferMetrics(CollectorRegistry())
        connect = LoopbackDirectory().connect
        self.sender = Sender(pool, PREFILL, connect, MonotonicClock(), metrics, bridge)
        self.calls = Calls(
            self.sender, self.granted.append, lambda name, state: self.closed.append((name, state))
        )
        self.prompt: Prompt = make_prompt(6, now=MonotonicClock().now())
        self.ticket = HandoffTicket(
            new_ticket_id(), self.prompt.job.request.request_id, PREFILL, DECODE, pool.layout, 6, ()
        )

    async def ends(self, call: PrefillCall) -> BaseException | None:
        assert await self.calls.wait_idle(5.0)
        assert len(self.calls) == 0
        assert self.sender.num_sessions == 0
        return None if call.reply.cancelled() else call.reply.exception()


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_a_call_that_ended_before_its_ticket_was_started_offers_nothing(desk: Desk) -> None:
    call = desk.calls.open(desk.prompt)
    call.fail(Cancelled("gone"))
    desk.calls.started(desk.prompt, desk.ticket)
    assert desk.closed == [(desk.ticket.ticket_id, TicketState.ABORTED)]
    assert isinstance(await desk.ends(call), Cancelled)


async def test_a_ticket_started_for_a_call_that_has_left_is_closed(desk: Desk) -> None:
    call = desk.calls.open(desk.prompt)
    call.reply.cancel()
    assert await desk.ends(call) is None
    desk.calls.started(desk.prompt, desk.ticket)
    assert desk.closed == [(desk.ticket.ticket_id, TicketState.ABORTED)]
    desk.calls.blocks_ready(desk.prompt, 0, (1, 2))
    desk.calls.computed(desk.prompt, RESULT, is_finished=False)
    desk.calls.failed(desk.prompt, Cancelled("late"))


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "end",
    [
        lambda desk: desk.calls.failed(desk.prompt, Cancelled("gone")),
        lambda desk: desk.calls.expired(desk.prompt.job.ticket_id),
        lambda desk: desk.calls.computed(desk.prompt, RESULT, is_finished=True),
    ],
    ids=["failed", "expired", "finished"],
)
async def test_a_ticket_that_ends_early_is_closed_once_however_far_it_was(
    desk: Desk, end: Callable[[Desk], None], num_turns: int
) -> None:
    call = desk.calls.open(desk.prompt)
    desk.calls.started(desk.prompt, desk.ticket)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    end(desk)
    call.reply.cancel()
    await desk.ends(call)
    assert desk.closed == [(desk.ticket.ticket_id, TicketState.ABORTED)]
    assert desk.granted == []


async def test_a_decode_worker_that_cannot_be_reached_fails_the_call(desk: Desk) -> None:
    call = desk.calls.open(desk.prompt)
    desk.calls.started(desk.prompt, desk.ticket)
    desk.calls.blocks_ready(desk.prompt, 0, (0, 1))
    desk.calls.computed(desk.prompt, RESULT, is_finished=False)
    error = await desk.ends(call)
    assert isinstance(error, ServingError)
    assert error.retryable
    assert desk.closed == [(desk.ticket.ticket_id, TicketState.ABORTED)]


async def test_a_first_token_that_ends_the_answer_needs_no_grant(desk: Desk) -> None:
    call = desk.calls.open(desk.prompt)
    desk.calls.started(desk.prompt, desk.ticket)
    finished = PrefillResult((TokenDelta(0, 0, (5,), finish_reason=FinishReason.STOP),), 0, 0.0, 0.0)
    desk.calls.computed(desk.prompt, finished, is_finished=True)
    assert call.reply.result() is finished
    await desk.ends(call)


async def test_a_cancel_names_a_ticket_or_a_whole_request(desk: Desk) -> None:
    job = desk.prompt.job
    call = desk.calls.open(desk.prompt)
    assert desk.calls.matching(CancelJob(job.request.request_id)) == [call]
    assert desk.calls.matching(CancelJob(job.request.request_id, job.ticket_id)) == [call]
    assert desk.calls.matching(CancelJob(job.request.request_id, new_ticket_id())) == []
    assert desk.calls.matching(CancelJob(job.request.request_id, job.ticket_id, sample_index=0)) == []
    call.reply.cancel()
    await desk.ends(call)
