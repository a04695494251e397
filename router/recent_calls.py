"""RecentCalls: what the status page tells of the last calls: where they went, why, and how long they took.

Owns a short memory of calls that have ended, without anything of what was said, and the flows between workers
over the last minute, counted by the second. Written when a call ends, read when the page asks. Lives on the
event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from router.answering import PromptReader
from router.decision import Plan
from router.explanation import explanation_object
from router.metrics import Outcome
from router.spans import EndedCall
from router.why import why_line

WINDOW_S = 60
_MAX_CALLS = 40
# of a call with many prompts only the first ones are told
_MAX_PROMPTS = 4

Flow = tuple[str | None, str | None]
"""From the worker that reads to the one that answers; None: there is no such one."""


@dataclass(slots=True)
class _Second:
    """What ended within one second of the clock."""

    number: int
    outcomes: Counter[str] = field(default_factory=Counter)
    num_prompts: Counter[Flow] = field(default_factory=Counter)
    num_tokens: Counter[Flow] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)


class RecentCalls:
    """One per router."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)
        self._calls: deque[dict[str, Any]] = deque(maxlen=_MAX_CALLS)

    def add(self, call: EndedCall, outcome: Outcome, reason: str, ended_at_s: float) -> None:
        """`ended_at_s`: seconds since 1970, for people; everything else goes by the router's clock."""
        second = self._second(call.ended_at)
        second.outcomes[outcome.value] += 1
        told: dict[str, Any] = {
            "id": call.call_id,
            "ended_at_s": round(ended_at_s, 3),
            "endpoint": call.endpoint,
            "outcome": outcome.value,
            "reason": reason,
            "seconds": round(call.ended_at - call.arrived_at, 4),
            "num_prompts": 0,
            "prompts": [],
        }
        if call.answering is not None:
            usage = call.answering.usage()
            second.prompt_tokens += usage.num_prompt_tokens
            second.cached_tokens += usage.num_cached_tokens
            second.output_tokens += usage.num_completion_tokens
            readers = call.answering.readers
            for request, reader in zip(call.answering.requests, readers, strict=True):
                _count(second, request.num_prompt_tokens, reader, call.ended_at)
            prompts = explanation_object(call.answering, call.call_id)["prompts"][:_MAX_PROMPTS]
            for prompt, reader in zip(prompts, readers, strict=False):
                prompt["why"] = None if reader.decision is None else why_line(reader.decision)
            told |= {
                "num_prompts": len(readers),
                "prompts": prompts,
                "prompt_tokens": usage.num_prompt_tokens,
                "output_tokens": usage.num_completion_tokens,
            }
        self._calls.appendleft(told)

    def calls(self) -> list[dict[str, Any]]:
        """The last calls, the newest first."""
        return list(self._calls)

    def flows(self, now: float) -> list[dict[str, Any]]:
        """Prompts and tokens by the way they took, over the last `WINDOW_S` seconds."""
        seconds = self._window(now)
        prompts: Counter[Flow] = Counter()
        tokens: Counter[Flow] = Counter()
        for second in seconds:
            prompts.update(second.num_prompts)
            tokens.update(second.num_tokens)
        return [
            {"prefill": flow[0], "decode": flow[1], "prompts": count, "tokens": tokens[flow]}
            for flow, count in prompts.most_common()
        ]

    def totals(self, now: float) -> dict[str, Any]:
        """Sums and percentiles over the last `WINDOW_S` seconds; None where nothing was measured."""
        seconds = self._window(now)
        outcomes: Counter[str] = Counter()
        for second in seconds:
            outcomes.update(second.outcomes)
        ttfts = sorted(value for second in seconds for value in second.ttfts_s)
        tpots = sorted(value for second in seconds for value in second.tpots_s)
        return {
            "window_s": WINDOW_S,
            "outcomes": dict(outcomes),
            "prompt_tokens": sum(second.prompt_tokens for second in seconds),
            "cached_tokens": sum(second.cached_tokens for second in seconds),
            "output_tokens": sum(second.output_tokens for second in seconds),
            "ttft_ms": _percentiles(ttfts),
            "tpot_ms": _percentiles(tpots),
        }

    def _second(self, now: float) -> _Second:
        number = int(now)
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]

    def _window(self, now: float) -> list[_Second]:
        oldest = int(now) - WINDOW_S
        return [second for second in self._seconds if second.number > oldest]


def _count(second: _Second, num_prompt_tokens: int, reader: PromptReader, ended_at: float) -> None:
    decision, stamps = reader.decision, reader.stamps
    if decision is not None:
        reads = None if decision.prefill is None else decision.prefill.ref.worker_id
        answers = None if decision.decode is None else decision.decode.ref.worker_id
        flow = (reads, None if decision.plan is Plan.PREFILL_ONLY else answers)
        second.num_prompts[flow] += 1
        second.num_tokens[flow] += num_prompt_tokens
    if stamps.ttft_s is not None and stamps.first_token_at is not None:
        second.ttfts_s.append(stamps.ttft_s)
        num_after = max((sample.num_tokens for sample in reader.samples), default=0) - 1
        if num_after > 0:
            second.tpots_s.append((ended_at - stamps.first_token_at) / num_after)


def _percentiles(values: list[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds, by the nearest rank."""
    return {name: _rank(values, share) for name, share in (("p50", 0.5), ("p99", 0.99))}


def _rank(values: Iterable[float], share: float) -> float | None:
    found = list(values)
    if not found:
        return None
    return round(found[min(len(found) - 1, int(share * len(found)))] * 1e3, 2)
