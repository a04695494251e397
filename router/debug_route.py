"""POST /debug/route: where a request would go now, and why, without going there.

Owns the shape of that answer. The body is that of a completion or a chat; nothing is reserved, run or
counted. It tells of workers and of what they have cached, so it needs an operator's key where keys are asked
for. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from core.ids import Role
from core.request import Request
from router.body_reader import read_body
from router.decision import Candidate, Decision
from router.endpoint import ReadCall, Rooms
from router.header_fields import header_fields
from router.json_body import parse_json
from router.placer import Search
from router.setbacks import Setbacks
from router.why import why_line

_MAX_MS_DIGITS = 3


class DebugRoute:
    """The page. `read_completion` and `read_chat` are those of the endpoints."""

    def __init__(self, rooms: Rooms, read_completion: ReadCall, read_chat: ReadCall) -> None:
        self._rooms = rooms
        self._read_completion = read_completion
        self._read_chat = read_chat

    async def answer(self, http: HTTPRequest) -> Response:
        """Raises ServingError as the endpoints do."""
        rooms = self._rooms
        headers = header_fields(http.headers.raw)
        caller = rooms.tenants.operator_at(headers)
        deadline = rooms.admission.deadline(headers.get("x-request-timeout"))
        priority = rooms.admission.priority(headers.get("x-priority"), caller.tenant)
        data = await read_body(
            http.scope, http.receive, rooms.config.max_body_bytes, deadline.left_s(rooms.pipeline.clock)
        )
        body = await asyncio.to_thread(parse_json, data)
        rooms.model.is_asked(body)
        read: ReadCall = self._read_completion
        if isinstance(body, dict) and "messages" in body:
            read = self._read_chat
        call = await asyncio.to_thread(read, body, rooms.admission.max_context())
        requests = rooms.admission.requests(call, "debug", caller.tenant, priority)
        answer = {
            "policy": rooms.config.policy.value,
            "prompts": [self._explained(request) for request in requests],
        }
        return Response(orjson.dumps(answer), media_type="application/json")

    def _explained(self, request: Request) -> dict[str, Any]:
        pipeline = self._rooms.pipeline
        now = pipeline.clock.now()
        setbacks = Setbacks(self._rooms.config, pipeline.clock)
        demand = pipeline.placer.demand(request, num_emitted=0, num_samples=request.num_samples)
        search = pipeline.placer.seek(request, request.prompt_token_ids, demand)
        decision = search.decide(setbacks, now)
        return {
            "num_prompt_tokens": request.num_prompt_tokens,
            "winner": None if decision is None else _decision(decision),
            "others": [] if decision is None else [_decision(other) for other in decision.others],
            "why": _why(decision, lambda: setbacks.final_error(search.usable_answerers()).message),
            "candidates": _candidates(search, setbacks, now),
        }


def _candidates(search: Search, setbacks: Setbacks, now: float) -> list[dict[str, Any]]:
    return [
        _candidate(candidate)
        for role in (Role.PREFILL, Role.DECODE)
        for candidate in search.candidates(role, setbacks, now)
    ]


def _candidate(candidate: Candidate) -> dict[str, Any]:
    status = candidate.status
    return {
        "worker": candidate.ref.worker_id,
        "role": candidate.ref.role.value,
        "node": candidate.node,
        "cached_tokens": candidate.num_cached_tokens,
        "ahead_tokens": candidate.num_ahead_tokens,
        "streams": candidate.num_streams,
        "sequences": candidate.num_seqs,
        "max_sequences": None if status is None else status.max_num_seqs,
        "free_blocks": None if status is None else status.num_free_blocks + status.num_cached_blocks,
        "pending_blocks": candidate.num_pending_blocks,
        "pace": round(candidate.pace, _MAX_MS_DIGITS),
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "plan": decision.plan.value,
        "prefill_worker": None if decision.prefill is None else decision.prefill.ref.worker_id,
        "decode_worker": None if decision.decode is None else decision.decode.ref.worker_id,
        "pull_from": None if decision.pull_from is None else decision.pull_from.ref.worker_id,
        "cached_tokens": decision.num_cached_tokens,
        "cost_ms": round(decision.cost_ms, _MAX_MS_DIGITS),
        "terms_ms": {term: round(ms, _MAX_MS_DIGITS) for term, ms in decision.terms.items()},
    }


def _why(decision: Decision | None, refusal: Callable[[], str]) -> str:
    return f"no worker can take it now: {refusal()}" if decision is None else why_line(decision)
