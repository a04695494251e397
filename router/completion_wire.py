"""CompletionWire: the choices of /v1/completions.

Owns `text`, the four parallel lists of `logprobs`, and echo, whose prompt comes first in both. Pure.
"""

from __future__ import annotations

from typing import Any

from core.request import TokenLogprob
from router.answering import Answering, ChoiceEvent
from router.detokenizer import Detokenizer
from router.text import TextDelta, TextLogprob
from router.token_bytes import TokenBytes
from router.wire import finish_word, finite


class CompletionWire:
    """Shapes of `text_completion`."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def opening(self, answering: Answering) -> list[dict[str, Any]]:
        return []

    def pieces(self, answering: Answering, event: ChoiceEvent) -> list[dict[str, Any]]:
        call, delta = answering.call, event.delta
        chunks = []
        is_opening = event.is_first and (call.is_echoed or call.are_token_ids_returned)
        if is_opening or delta.text or delta.logprobs or (call.are_token_ids_returned and delta.token_ids):
            chunks.append(self._choice(answering, event.index, delta, is_opening))
        if delta.finish_reason is not None:
            end: dict[str, Any] = {"index": event.index, "text": "", "logprobs": None}
            chunks.append(end | {"finish_reason": finish_word(delta.finish_reason)})
        return chunks

    def choice(self, answering: Answering, index: int, delta: TextDelta) -> dict[str, Any]:
        choice = self._choice(answering, index, delta, is_opening=True)
        return choice | {"finish_reason": finish_word(delta.finish_reason)}

    def _choice(self, answering: Answering, index: int, delta: TextDelta, is_opening: bool) -> dict[str, Any]:
        call = answering.call
        prompt, reader = answering.prompt_of(index)
        is_echo = call.is_echoed and is_opening
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + delta.text if is_echo else delta.text,
            "logprobs": None,
            "finish_reason": None,
        }
        if call.sampling.logprobs is not None:
            lists = _LogprobLists(self._bytes, call.sampling.logprobs)
            if is_echo:
                lists.add_prompt(prompt.token_ids, reader.prompt_logprobs, prompt.has_added_bos)
            lists.add(delta.logprobs, len(prompt.text) if call.is_echoed else 0)
            choice["logprobs"] = lists.as_object()
        if call.are_token_ids_returned:
            choice["token_ids"] = list(delta.token_ids)
            choice["prompt_token_ids"] = list(prompt.token_ids) if is_opening else None
        return choice


class _LogprobLists:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`: one entry for each visible token."""

    def __init__(self, token_bytes: TokenBytes, num_top: int) -> None:
        self._bytes = token_bytes
        self._num_top = num_top
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, entries: tuple[TextLogprob, ...], base: int) -> None:
        for entry in entries:
            self._add(entry.logprob, base + entry.offset)

    def add_prompt(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], has_added_bos: bool
    ) -> None:
        """Each prompt token at its offset in the prompt's text; nothing predicts the first one."""
        detokenizer = Detokenizer()
        num_dropped = 1 if self._bytes.starts_with_dummy_space else 0
        offset = 0
        for index, token_id in enumerate(token_ids):
            if index == 0:
                self._tokens.append(self._bytes.label(token_id))
                self._logprobs.append(None)
                self._tops.append(None)
                self._offsets.append(0)
            else:
                self._add(logprobs[index - 1], max(0, offset - num_dropped))
            if not (index == 0 and has_added_bos):
                offset += len(detokenizer.feed(self._bytes.of(token_id)))

    def as_object(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _add(self, logprob: TokenLogprob, offset: int) -> None:
        label = self._bytes.label(logprob.token_id)
        self._tokens.append(label)
        self._logprobs.append(finite(logprob.logprob))
        top: dict[str, float] = {}
        for token_id, value in logprob.top[: self._num_top]:
            top.setdefault(self._bytes.label(token_id), finite(value))
        top.setdefault(label, finite(logprob.logprob))
        self._tops.append(top)
        self._offsets.append(offset)
