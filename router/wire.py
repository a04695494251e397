"""Wire: how answers of one endpoint look, whole and in pieces; what both endpoints share.

Owns the envelope, usage, and the numbers that JSON can carry. `completion_wire` and `chat_wire` own the
shapes of their choices. Pure values, built on the event loop.
"""

from __future__ import annotations

from typing import Any, Protocol

from core.request import FinishReason
from router.answering import Answering, ChoiceEvent, Usage
from router.text import TextDelta

# what OpenAI writes for "practically impossible"; JSON has no infinity
_LOWEST_LOGPROB = -9999.0


class Wire(Protocol):
    """The shapes of one endpoint."""

    whole_object: str
    chunk_object: str

    def opening(self, answering: Answering) -> list[dict[str, Any]]:
        """Choices of the chunks that come before any text."""
        ...

    def pieces(self, answering: Answering, event: ChoiceEvent) -> list[dict[str, Any]]:
        """Choices of the chunks that tell of `event`; one with a finish reason comes last."""
        ...

    def choice(self, answering: Answering, index: int, delta: TextDelta) -> dict[str, Any]:
        """A whole choice; `delta` is all of its text."""
        ...


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability as legal JSON and never above 0."""
    return min(0.0, logprob) if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def finish_word(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def join(deltas: list[TextDelta]) -> TextDelta:
    """Several pieces of one choice as one."""
    return TextDelta(
        sample_index=deltas[0].sample_index if deltas else 0,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason if deltas else None,
    )
