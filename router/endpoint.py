"""Endpoint: POST /v1/completions and /v1/chat/completions, from bytes to bytes.

Owns the life of one HTTP call: body, validation, head, stream or whole answer, errors before and after the
first byte, and the client's going away, which cancels everything at once. Each call is the server's task
and one of its own. Lives on the event loop; what a large body means is found out on another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from core.errors import Cancelled, ServingError
from router.accounts import Account, Accounts
from router.admission import Admission, call_id_for, cost_of, echoed_request_id
from router.answering import Answering, ChoiceEvent
from router.api_call import ApiCall
from router.body_reader import read_body, wait_for_disconnect
from router.call_log import log_ended
from router.capture import Captures
from router.config import RouterConfig
from router.explanation import explanation_headers, explanation_object
from router.header_fields import header_fields
from router.http_errors import error_body, error_headers, internal_error
from router.json_body import parse_json
from router.metrics import Outcome, RequestLabels, RouterMetrics, outcome_of
from router.pipeline import Pipeline
from router.recent_calls import RecentCalls
from router.reply import Reply
from router.served_model import ServedModel
from router.spans import EndedCall, call_span
from router.sse import CONTENT_TYPE, DONE, frame
from router.tenants import Tenants
from router.tracing import Tracing
from router.wire import Wire, join, usage_object

_log = logging.getLogger(__name__)

T = TypeVar("T")

# reading a larger body would hold up the event loop for milliseconds, the largest for seconds
_MAX_INLINE_BYTES = 8_000

ReadCall = Callable[[Any, int], ApiCall]
"""A parsed body and the context limit to the call it means."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """What an endpoint works with."""

    config: RouterConfig
    model: ServedModel
    admission: Admission
    pipeline: Pipeline
    metrics: RouterMetrics
    tenants: Tenants
    accounts: Accounts
    recent: RecentCalls
    tracing: Tracing | None = None
    captures: Captures | None = None


class Endpoint:
    """An ASGI application for one route. `name` is its label in metrics."""

    def __init__(self, name: str, rooms: Rooms, read_call: ReadCall, wire: Wire) -> None:
        self.name = name
        self.rooms = rooms
        self.read_call = read_call
        self.wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self, scope, send)
        work = asyncio.create_task(exchange.run(receive))
        try:
            await exchange.body_read.wait()
            gone = asyncio.create_task(wait_for_disconnect(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
        finally:
            # the client has gone, or the server takes this task away: for the work it is the same
            if not exchange.reply.is_complete:
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self.rooms.metrics.responded(self.name, exchange.reply.status or Cancelled.http_status)


class _Exchange:
    """One call under way."""

    def __init__(self, endpoint: Endpoint, scope: Scope, send: Send) -> None:
        self.reply = Reply(send)
        self.body_read = asyncio.Event()
        self._endpoint = endpoint
        self._rooms = endpoint.rooms
        self._scope = scope
        self._arrived_at = endpoint.rooms.pipeline.clock.now()
        self._labels = RequestLabels(endpoint.name)
        self._is_counted = False
        headers = header_fields(scope["headers"])
        self._headers = headers
        self._authorization = headers.get("authorization")
        self._priority = headers.get("x-priority")
        self._account: Account | None = None
        self._body: Any = None
        self._timeout = headers.get("x-request-timeout")
        self._call_id = call_id_for(endpoint.name)
        self._created = int(time.time())
        self.reply.headers["x-request-id"] = echoed_request_id(headers.get("x-request-id"), self._call_id)

    async def run(self, receive: Receive) -> None:
        """Answer. Every way out is counted, and nothing but cancellation gets out."""
        try:
            answering = await self._open(receive)
            async with answering:
                if answering.call.is_streamed:
                    await self._stream(answering)
                else:
                    await self._whole(answering)
        except asyncio.CancelledError:
            self._ended(Outcome.ABORTED, Cancelled.code)
            raise
        except ServingError as error:
            self._ended(*outcome_of(error))
            await self._tell(error)
        except Exception as error:  # noqa: BLE001 - logged; the client hears of an internal error
            _log.exception("a request failed")
            self._ended(*outcome_of(error))
            await self._tell(internal_error())
        else:
            self._ended(Outcome.SUCCEEDED, answering.finish_reason().value)
        finally:
            self.body_read.set()

    async def _open(self, receive: Receive) -> Answering:
        rooms = self._rooms
        caller = rooms.tenants.caller(self._authorization)
        self._account = rooms.accounts.open(caller, self._call_id, self._endpoint.name)
        deadline = rooms.admission.deadline(self._timeout)
        priority = rooms.admission.priority(self._priority, caller.tenant)
        try:
            left_s = deadline.left_s(rooms.pipeline.clock)
            data = await read_body(self._scope, receive, rooms.config.max_body_bytes, left_s)
        finally:
            self.body_read.set()
        body = await _maybe_elsewhere(len(data), lambda: parse_json(data))
        if rooms.model.is_asked(body):
            self._labels = RequestLabels(self._endpoint.name, rooms.model.name)
        self._started()
        max_context = rooms.admission.max_context()
        read_at = rooms.pipeline.clock.now()
        call = await _maybe_elsewhere(len(data), lambda: self._endpoint.read_call(body, max_context))
        tokenize_s = rooms.pipeline.clock.now() - read_at
        requests = rooms.admission.requests(call, self._call_id, caller.tenant, priority)
        cost = cost_of(requests)
        # the limits first: others may give way in the line, which must not be for a call that is not let in
        await self._account.admit(cost)
        rooms.admission.check_room(requests, cost, deadline)
        self.reply.headers["x-baton-seed"] = ",".join(str(request.sampling.seed) for request in requests)
        answering = Answering(
            call,
            requests,
            rooms.model.tokenizer.bytes,
            rooms.pipeline,
            rooms.admission,
            deadline,
            self._labels,
            self._arrived_at,
            caller.tenant,
            tokenize_s,
        )
        self._account.answering = answering
        if rooms.captures is not None:
            self._body = body
            answering.keep_texts()
        return answering

    async def _whole(self, answering: Answering) -> None:
        deltas: dict[int, list[Any]] = {}
        while (event := await answering.next()) is not None:
            deltas.setdefault(event.index, []).append(event.delta)
        wire = self._endpoint.wire
        choices = [
            wire.choice(answering, index, join(deltas.get(index, [])))
            for index in range(answering.num_choices)
        ]
        self._name_what_is_left()
        self._explain(answering)
        body = self._envelope(wire.whole_object, choices)
        await self.reply.json(body | {"usage": self._usage(answering)})

    async def _stream(self, answering: Answering) -> None:
        """The head waits for the first token, so that errors before it have a status of their own."""
        event: ChoiceEvent | None = None
        try:
            async with asyncio.timeout(self._rooms.config.head_hold_s):
                event = await answering.next()
            is_pending = False
        except TimeoutError:
            is_pending = True
        self._name_what_is_left()
        self._explain(answering)
        await self.reply.start(CONTENT_TYPE, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        wire = self._endpoint.wire
        await self._write(answering, wire.opening(answering))
        if is_pending:
            event = await answering.next()
        while event is not None:
            await self._write(answering, wire.pieces(answering, event))
            event = await answering.next()
        if answering.call.is_usage_included:
            body = self._envelope(wire.chunk_object, [])
            await self.reply.write(frame(body | {"usage": self._usage(answering)}))
        await self.reply.write(DONE)
        await self.reply.end()

    async def _write(self, answering: Answering, choices: list[dict[str, Any]]) -> None:
        """One event for each choice."""
        if not choices:
            return
        extra = {"usage": None} if answering.call.is_usage_included else {}
        kind = self._endpoint.wire.chunk_object
        await self.reply.write(b"".join(frame(self._envelope(kind, [choice]) | extra) for choice in choices))

    async def _tell(self, error: ServingError) -> None:
        """An error as a status, or, once the head is out, as the last event of the stream."""
        if not self.reply.is_started:
            self._name_what_is_left()
            await self.reply.json(error_body(error), error.http_status, error_headers(error))
        else:
            await self.reply.write(frame(error_body(error)))
            await self.reply.end()

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._call_id,
            "object": kind,
            "created": self._created,
            "model": self._rooms.model.name,
            "choices": choices,
        }

    def _name_what_is_left(self) -> None:
        if self._account is not None:
            self.reply.headers.update(self._account.rate_headers())

    def _explain(self, answering: Answering) -> None:
        if self._rooms.config.explain:
            self.reply.headers.update(explanation_headers(answering))

    def _usage(self, answering: Answering) -> dict[str, Any]:
        usage = usage_object(answering.usage())
        if self._rooms.config.explain:
            usage["baton"] = explanation_object(answering, self._call_id)
        return usage

    def _started(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._rooms.metrics.started(self._labels)

    def _ended(self, outcome: Outcome, reason: str) -> None:
        self._started()
        seconds = self._rooms.pipeline.clock.now() - self._arrived_at
        self._rooms.metrics.ended(self._labels, outcome, reason, seconds)
        if self._account is not None:
            self._account.close(outcome, reason, seconds)
        call = EndedCall(
            self._endpoint.name,
            self._labels.model,
            self._call_id,
            self._arrived_at,
            self._arrived_at + seconds,
            None if self._account is None else self._account.answering,
            None if outcome is Outcome.SUCCEEDED else reason,
        )
        self._rooms.recent.add(call, outcome, reason, time.time())
        log_ended(call, outcome, reason)
        if self._rooms.tracing is not None:
            self._rooms.tracing.record(call_span(call), self._headers)

        if self._rooms.captures is not None and self._account is not None:
            self._capture(self._rooms.captures, self._account.answering, outcome, reason, seconds)

    def _capture(
        self,
        captures: Captures,
        answering: Answering | None,
        outcome: Outcome,
        reason: str,
        seconds: float,
    ) -> None:
        """Keep what was said, if that is wanted and the call went wrong after it was understood."""
        if answering is None:
            return
        waits = [reader.stamps.ttft_s for reader in answering.readers if reader.stamps.ttft_s is not None]
        why = captures.reason(outcome, max(waits, default=None), seconds)
        if why is None:
            return
        facts = {
            "why": why,
            "outcome": outcome.value,
            "reason": reason,
            "created": self._created,
            "seconds": seconds,
            "explanation": explanation_object(answering, self._call_id),
        }
        answers = ["".join(pieces) for pieces in answering.kept_texts or ()]
        captures.keep(self._call_id, facts, {"request": self._body, "answers": answers})


async def _maybe_elsewhere(num_bytes: int, work: Callable[[], T]) -> T:
    return work() if num_bytes <= _MAX_INLINE_BYTES else await asyncio.to_thread(work)
