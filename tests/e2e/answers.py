"""Answer: one choice of a response, the same view for completions and chat, streamed and not.

Owns how the pieces of a stream are put together and the rules of framing that hold for every stream. Pure
functions on parsed JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """Text, per-token logprobs (when asked for) and how it ended; `usage` is that of the whole response.

    `tops[i]` maps the candidates' strings to logprobs in the order given. `token_bytes` is filled for chat
    only.
    """

    index: int
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_bytes: list[bytes | None] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    pieces: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        assert self.usage is not None, "the response carries no usage"
        return int(self.usage["completion_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        assert self.usage is not None, "the response carries no usage"
        return int(self.usage["prompt_tokens"])

    @property
    def num_cached_tokens(self) -> int:
        assert self.usage is not None, "the response carries no usage"
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def add_logprobs(self, block: dict[str, Any] | None) -> None:
        if block is None:
            return
        if "content" in block:
            for entry in block["content"] or []:
                self.tokens.append(entry["token"])
                self.token_bytes.append(None if entry["bytes"] is None else bytes(entry["bytes"]))
                self.logprobs.append(entry["logprob"])
                self.tops.append({item["token"]: item["logprob"] for item in entry["top_logprobs"]})
            return
        self.tokens += block["tokens"]
        self.logprobs += block["token_logprobs"]
        self.tops += block["top_logprobs"] or [None] * len(block["tokens"])
        self.offsets += block["text_offset"]


def of_response(body: dict[str, Any]) -> list[Answer]:
    """The choices of a response that was not streamed, by index."""
    answers = []
    for choice in body["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        answer = Answer(choice["index"], text or "", finish_reason=choice["finish_reason"], raw=body)
        answer.usage = body["usage"]
        answer.add_logprobs(choice.get("logprobs"))
        answers.append(answer)
    assert [answer.index for answer in answers] == list(range(len(answers))), "choices out of order"
    return answers


def of_stream(events: Sequence[dict[str, Any]], has_usage: bool) -> list[Answer]:
    """The choices of a stream, by index, after checking the framing of all of its events."""
    failed = [event for event in events if "error" in event]
    assert not failed, f"the stream ended with an error: {failed[0]}"
    assert events, "a stream without events"
    first = events[0]
    is_chat = first["object"] == "chat.completion.chunk"
    assert is_chat or first["object"] == "text_completion", first["object"]
    usage = check_usage_events(events, has_usage)
    answers: dict[int, Answer] = {}
    for event in events:
        for key in ("id", "object", "created", "model"):
            assert event[key] == first[key], f"{key} changes within the stream"
        for choice in event["choices"]:
            answer = answers.get(choice["index"])
            if answer is None:
                answer = answers[choice["index"]] = Answer(choice["index"], usage=usage)
                if is_chat:
                    assert choice["delta"].get("role") == "assistant", f"no role in the first delta: {choice}"
            elif is_chat:
                assert not choice["delta"].get("role"), f"a second role chunk: {choice}"
            assert answer.finish_reason is None, f"an event after the terminal one: {choice}"
            piece = (choice["delta"].get("content") if is_chat else choice["text"]) or ""
            answer.text += piece
            answer.pieces.append(piece)
            answer.add_logprobs(choice.get("logprobs"))
            answer.finish_reason = choice["finish_reason"]
    ordered = [answers[index] for index in sorted(answers)]
    assert [answer.index for answer in ordered] == list(range(len(ordered))), "indexes with holes"
    for answer in ordered:
        assert answer.finish_reason is not None, f"choice {answer.index} never ended"
    return ordered


def check_usage_events(events: Sequence[dict[str, Any]], has_usage: bool) -> dict[str, Any] | None:
    """`usage` comes exactly when asked for: once, last, in an event without choices."""
    carriers = [i for i, event in enumerate(events) if event.get("usage") is not None]
    empty = [i for i, event in enumerate(events) if event["choices"] == []]
    if not has_usage:
        assert not carriers, f"usage unasked: {events[carriers[0]]}"
        assert not empty, "an event without choices, and no usage was asked for"
        return None
    assert carriers == [len(events) - 1], f"usage in events {carriers} of {len(events)}"
    assert empty == carriers, "usage travels in an event with empty choices"
    usage: dict[str, Any] = events[-1]["usage"]
    return usage
