"""ChatWire: the choices of /v1/chat/completions.

Owns messages, deltas and the `content` list of logprobs. Pure.
"""

from __future__ import annotations

from typing import Any

from router.answering import Answering, ChoiceEvent
from router.text import TextDelta, TextLogprob
from router.token_bytes import TokenBytes
from router.wire import finish_word, finite


class ChatWire:
    """Shapes of `chat.completion` and `chat.completion.chunk`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def opening(self, answering: Answering) -> list[dict[str, Any]]:
        """Each choice introduces itself with its role before it has any text."""
        delta = {"role": "assistant", "content": ""}
        return [_chunk(index, delta, None, None) for index in range(answering.num_choices)]

    def pieces(self, answering: Answering, event: ChoiceEvent) -> list[dict[str, Any]]:
        call, delta = answering.call, event.delta
        chunks = []
        if delta.text or delta.logprobs or (call.are_token_ids_returned and delta.token_ids):
            logprobs = self._logprobs(answering, delta)
            chunk = _chunk(event.index, {"content": delta.text}, logprobs, None)
            chunks.append(chunk | _token_ids(answering, event.index, delta, event.is_first))
        if delta.finish_reason is not None:
            chunks.append(_chunk(event.index, {}, None, finish_word(delta.finish_reason)))
        return chunks

    def choice(self, answering: Answering, index: int, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(answering, delta),
            "finish_reason": finish_word(delta.finish_reason),
            **_token_ids(answering, index, delta, is_opening=True),
        }

    def _logprobs(self, answering: Answering, delta: TextDelta) -> dict[str, Any] | None:
        num_top = answering.call.sampling.logprobs
        if num_top is None:
            return None
        return {"content": [self._entry(entry, num_top) for entry in delta.logprobs], "refusal": None}

    def _entry(self, entry: TextLogprob, num_top: int) -> dict[str, Any]:
        top = [self._token(token_id, value) for token_id, value in entry.logprob.top[:num_top]]
        return self._token(entry.logprob.token_id, entry.logprob.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._bytes.label(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._bytes.of(token_id)),
        }


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token_ids(answering: Answering, index: int, delta: TextDelta, is_opening: bool) -> dict[str, Any]:
    if not answering.call.are_token_ids_returned:
        return {}
    prompt, _ = answering.prompt_of(index)
    return {
        "token_ids": list(delta.token_ids),
        "prompt_token_ids": list(prompt.token_ids) if is_opening else None,
    }
