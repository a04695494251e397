"""Conversation: the texts and request bodies of one session's turns.

Owns turning parts into words and words into a body of OpenAI's completions or chat interface. Not the
lengths, which are `plan`'s. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.loadtest.plan import Turn
from cluster.loadtest.settings import Api, Target
from cluster.loadtest.vocabulary import FIRST_WORD, Vocabulary


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is sent. `planned_prompt_tokens` 0: not known, since an answer is part of it."""

    body: dict[str, Any]
    planned_prompt_tokens: int
    planned_output_tokens: int


@dataclass(frozen=True, slots=True)
class Composer:
    """Makes conversations for one target. `model` is the name that the server knows."""

    target: Target
    model: str
    vocabulary: Vocabulary
    seed: int

    def conversation(self) -> Conversation:
        return Conversation(self)

    def text(self, turn: Turn, num_words: int | None = None) -> str:
        """The words of the turn's parts, the first `num_words` of them."""
        words: list[str] = []
        for part in turn.parts:
            chance = random.Random(f"{self.seed} {part.key}")
            words += chance.choices(self.vocabulary.words, k=part.num_tokens)
        return " ".join(words[:num_words])


class Conversation:
    """Asks turn after turn; each answer is added before the next."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._said: list[str] = []  # the client's texts and the server's, in turn

    def ask(self, turn: Turn) -> Ask:
        composer, is_first = self._composer, not self._said
        if is_first:
            num_words = composer.vocabulary.num_words(turn.num_new_tokens)
            text = f"{FIRST_WORD} {composer.text(turn, num_words)}".strip()
            num_prompt_tokens = composer.vocabulary.overhead + num_words
        else:
            text, num_prompt_tokens = composer.text(turn), 0
        self._said.append(text)
        body = request_body(composer.target, composer.model, self._said, turn.num_output_tokens)
        return Ask(body, num_prompt_tokens, turn.num_output_tokens)

    def add_reply(self, text: str) -> None:
        self._said.append(text)


def request_body(target: Target, model: str, said: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """The body that continues `said`, the client's texts and the server's in turn, by `max_tokens`."""
    body: dict[str, Any] = {
        "model": model,
        **_content(target.api, said),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return merged(body, target.more_body())


def merged(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`more` wins; its nulls take a field away."""
    whole = {**body, **more}
    return {key: value for key, value in whole.items() if not (key in more and value is None)}


def _content(api: Api, said: Sequence[str]) -> dict[str, Any]:
    if api is Api.CHAT:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}
    return {"prompt": " ".join(said)}
