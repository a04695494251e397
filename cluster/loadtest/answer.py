"""Answer: one streamed completion taken together, and the proof that it is complete.

Owns what counts as text and as the end: a finish reason, then `[DONE]`, and nothing between or after them but
the usage. An error event, broken JSON or a missing end raises BrokenStream: a stream that was cut short never
becomes a fast one. Moments are arguments; no I/O.
"""

from __future__ import annotations

from typing import Any

import orjson

from cluster.loadtest.event_stream import BrokenStream, Event
from cluster.loadtest.settings import StreamEnd

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
# an answer that was given up: `abort` is what vLLM and SGLang say
_NO_END = ("error", "abort", "cancelled")


class Answer:
    """Takes the events of one choice. `times` are those of events with text, and may be watched."""

    def __init__(self, end: StreamEnd) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self._end = end
        self._texts: list[str] = []
        self._has_ended = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, event: Event, now: float) -> None:
        """Raises BrokenStream."""
        if self._has_ended:
            raise BrokenStream("an event after [DONE]")
        if event.data == b"[DONE]":
            if self.finish_reason is None:
                raise BrokenStream("[DONE] without a finish reason")
            self._has_ended = True
            return
        body = self._object(event)
        if isinstance(usage := body.get("usage"), dict):
            self.usage = usage
        choices = body.get("choices")
        if not isinstance(choices, list):
            raise BrokenStream(f"an event without choices: {event.data[:200]!r}")
        for choice in choices:
            self._take_choice(choice, now)

    def complete(self) -> None:
        """The body is over. Raises BrokenStream if it ended too soon."""
        after = f"after {len(self.times)} events with text"
        if self.finish_reason is None:
            raise BrokenStream(f"the stream ended without a finish reason, {after}")
        if not self._has_ended and self._end is StreamEnd.DONE:
            raise BrokenStream(f"the stream ended without [DONE], {after}")

    def count(self, name: str) -> int | None:
        """`prompt_tokens` or `completion_tokens`, as the server counted; None if it did not."""
        value = self.usage.get(name)
        return value if type(value) is int else None

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if type(value) is int else 0

    def _object(self, event: Event) -> dict[str, Any]:
        try:
            body = orjson.loads(event.data)
        except orjson.JSONDecodeError as error:
            raise BrokenStream(f"an event that is not JSON: {event.data[:200]!r}") from error
        if not isinstance(body, dict):
            raise BrokenStream(f"an event that is not a JSON object: {event.data[:200]!r}")
        if event.kind == "error" or body.get("error") is not None:
            what = body.get("error", body)
            raise BrokenStream(f"an error after {len(self.times)} events with text: {str(what)[:500]}")
        return body

    def _take_choice(self, choice: Any, now: float) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise BrokenStream(f"a choice that was not asked for: {str(choice)[:200]}")
        text, has_content = _content(choice)
        if has_content:
            if self.finish_reason is not None:
                raise BrokenStream("text after the finish reason")
            self.times.append(now)
            self._texts.append(text)
        reason = choice.get("finish_reason")
        if reason is not None:
            if self.finish_reason is not None:
                raise BrokenStream("a second finish reason")
            if not isinstance(reason, str) or reason in _NO_END:
                raise BrokenStream(f"the finish reason {reason!r}")
            self.finish_reason = reason


def _content(choice: dict[str, Any]) -> tuple[str, bool]:
    """What is said, and whether anything came: the piece that only names the role is nothing."""
    if "text" in choice:
        text = choice["text"] or ""
        if not isinstance(text, str):
            raise BrokenStream(f"a text that is no text: {str(text)[:100]}")
        return text, bool(text)
    delta = choice.get("delta") or {}
    if not isinstance(delta, dict):
        raise BrokenStream(f"a delta that is no object: {str(delta)[:100]}")
    pieces = [delta[name] for name in _TEXTS if delta.get(name)]
    return str(delta.get("content") or ""), bool(pieces or delta.get("tool_calls"))
