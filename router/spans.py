"""Spans of one call, made from its stamps: what a trace shows, without anything of what was said.

Owns names and attributes: those of OpenTelemetry's GenAI conventions where they have one, `baton.*` else.
Knows no OpenTelemetry; `tracing` sends them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from core.telemetry import TTFTPart
from router.answering import Answering, PromptReader
from router.stamps import Stamps

Value = str | bool | int | float | tuple[str, ...]

# what the conventions call our endpoints
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment on the router's clock."""

    name: str
    at: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` to `end` on the router's clock. `error`: the code of the error by which it ended."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    children: tuple[Span, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that has ended. `answering` is None if it was refused before; `error` is an error's code."""

    endpoint: str
    model: str
    call_id: str
    arrived_at: float
    ended_at: float
    answering: Answering | None
    error: str | None


def call_span(call: EndedCall) -> Span:
    """The call, with the parts of each prompt's way as its children."""
    operation = _OPERATIONS[call.endpoint]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.response.id": call.call_id,
    }
    if call.model:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = call.model
    if call.error is not None:
        attributes["error.type"] = call.error
    children: list[Span] = []
    if call.answering is not None:
        attributes |= _call_attributes(call.answering)
        for index, reader in enumerate(call.answering.readers):
            children += _prompt_spans(index, reader, call.ended_at)
    name = f"{operation} {call.model}".strip()
    return Span(name, call.arrived_at, call.ended_at, attributes, children=tuple(children), error=call.error)


def _call_attributes(answering: Answering) -> dict[str, Value]:
    sampling, usage, stamps = answering.requests[0].sampling, answering.usage(), answering.readers[0].stamps
    reasons = (sample.finish_reason for reader in answering.readers for sample in reader.samples)
    found: dict[str, Value] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": answering.call.is_streamed,
        "gen_ai.request.choice.count": answering.call.n,
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        "gen_ai.response.finish_reasons": tuple(reason.value for reason in reasons if reason is not None),
    }
    if stamps.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = stamps.ttft_s
    return found


def _prompt_spans(index: int, reader: PromptReader, ended_at: float) -> list[Span]:
    """One span for each part of the time to first token, end to end, then one for the answer's way."""
    common = _prompt_attributes(index, reader)
    stamps = reader.stamps
    found = [Span(f"baton.{part.value}", start, end, common) for part, start, end in _laid_out(stamps)]
    if stamps.first_token_at is not None:
        waited = stamps.transfer_wait_s
        own = {} if waited is None else {"baton.transfer_wait_ms": waited * 1e3}
        events = tuple(
            SpanEvent(
                "baton.stall",
                stall.ended_at,
                {"baton.cause": stall.cause.value, "baton.stall_ms": stall.seconds * 1e3},
            )
            for stall in stamps.stalls
        )
        found.append(Span("baton.decode", stamps.first_token_at, ended_at, common | own, events))
    return found


def _prompt_attributes(index: int, reader: PromptReader) -> dict[str, Value]:
    decision = reader.decision
    found: dict[str, Value] = {"baton.prompt.index": index}
    if decision is None:
        return found
    found["baton.plan"] = decision.plan.value
    if decision.prefill is not None:
        found["baton.prefill_worker"] = decision.prefill.ref.worker_id
    if decision.decode is not None:
        found["baton.decode_worker"] = decision.decode.ref.worker_id
    if decision.pull_from is not None:
        found["baton.pull_from"] = decision.pull_from.ref.worker_id
    found["baton.predicted_cached_tokens"] = decision.num_cached_tokens
    found["baton.cached_tokens"] = reader.num_cached_tokens
    found["baton.num_attempts"] = reader.stamps.num_attempts
    return found


def _laid_out(stamps: Stamps) -> list[tuple[TTFTPart, float, float]]:
    """The parts one after the other: their lengths are measured, and their sum; time that went for the same
    purpose more than once (placing again, for example) is shown in one piece.
    """
    parts = [part for part in TTFTPart if part in stamps.parts]
    edges = [stamps.arrived_at]
    for part in parts:
        edges.append(edges[-1] + stamps.parts[part])
    return [(part, start, end) for part, (start, end) in zip(parts, pairwise(edges), strict=True)]
