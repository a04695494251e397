"""Explanation: where a call's prompts went and where their time went, as clients are told.

Owns the names and units of the headers and of the `baton` object in `usage`. Never holds content. Pure
values, built on the event loop.
"""

from __future__ import annotations

from typing import Any

from core.telemetry import StallCause, TTFTPart
from router.answering import Answering, PromptReader


def explanation_headers(answering: Answering) -> dict[str, str]:
    """What is known when the head goes out, of a call of one prompt that has been placed."""
    reader = answering.readers[0]
    decision = reader.decision
    if len(answering.readers) != 1 or decision is None:
        return {}
    found = {"x-baton-plan": decision.plan.value}
    if decision.prefill is not None:
        found["x-baton-prefill-worker"] = decision.prefill.ref.worker_id
    if decision.decode is not None:
        found["x-baton-decode-worker"] = decision.decode.ref.worker_id
    if decision.pull_from is not None:
        found["x-baton-pull-from"] = decision.pull_from.ref.worker_id
    found["x-baton-predicted-cached-tokens"] = str(decision.num_cached_tokens)
    if reader.stamps.ttft_s is not None:
        found["x-baton-cached-tokens"] = str(reader.num_cached_tokens)
        parts = _ttft_ms(reader).items()
        found["x-baton-ttft-ms"] = ", ".join(f"{name}={ms:.3f}" for name, ms in parts)
    return found


def explanation_object(answering: Answering, request_id: str) -> dict[str, Any]:
    """All of it, at the end of a call. Times in milliseconds."""
    return {"request_id": request_id, "prompts": [_prompt(reader) for reader in answering.readers]}


def _prompt(reader: PromptReader) -> dict[str, Any]:
    stamps, decision = reader.stamps, reader.decision
    found: dict[str, Any] = {}
    if decision is not None:
        found |= {
            "plan": decision.plan.value,
            "prefill_worker": None if decision.prefill is None else decision.prefill.ref.worker_id,
            "decode_worker": None if decision.decode is None else decision.decode.ref.worker_id,
            "pull_from": None if decision.pull_from is None else decision.pull_from.ref.worker_id,
            "predicted_cached_tokens": decision.num_cached_tokens,
            "cached_tokens": reader.num_cached_tokens,
            "terms_ms": {term: round(ms, 3) for term, ms in decision.terms.items()},
            "num_attempts": stamps.num_attempts,
        }
    if stamps.ttft_s is not None:
        found["ttft_ms"] = _ttft_ms(reader)
    if stamps.transfer_wait_s is not None:
        found["transfer_wait_ms"] = _ms(stamps.transfer_wait_s)
    found["stalls"] = [
        {"cause": cause.value, "count": len(seconds), "ms": _ms(sum(seconds))}
        for cause in StallCause
        if (seconds := [stall.seconds for stall in stamps.stalls if stall.cause is cause])
    ]
    return found


def _ttft_ms(reader: PromptReader) -> dict[str, float]:
    """The parts that took any time, in the order in which they come, and their sum."""
    stamps = reader.stamps
    assert stamps.ttft_s is not None
    found = {part.value: _ms(stamps.parts[part]) for part in TTFTPart if part in stamps.parts}
    return found | {"total": _ms(stamps.ttft_s)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
