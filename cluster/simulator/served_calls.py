"""ServedCalls: prompts that a running service is asked, and what their answers tell of where time went.

Owns the requests' form and reading parts of answers. What is asked, and what follows, is the calibration's.
Runs on its event loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.loadtest.client import Call, Client, NoAnswer
from cluster.loadtest.prompts import Ask, request_body
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.settings import Target
from cluster.loadtest.vocabulary import FIRST_WORD, Vocabulary


@dataclass(frozen=True, slots=True)
class Told:
    """Of one answer, in seconds since the calibration's start: when it was due, when its first token came;
    how long its prompt waited at its worker and was read. `is_local`: read by the worker that decodes.
    `num_cached_tokens` of its prompt needed not be read.
    """

    num_tokens: int
    due_s: float
    first_at_s: float
    queue_s: float
    read_s: float
    is_local: bool
    num_cached_tokens: int = 0

    @property
    def rest_s(self) -> float:
        """What the first token waited for besides: router, messages, a free core."""
        return self.first_at_s - self.due_s - self.queue_s - self.read_s

    def reading(self, after_s: float) -> tuple[float, float]:
        """From when to when it was read, if its token came `after_s` later."""
        ended_s = self.first_at_s - after_s
        return ended_s - self.read_s, ended_s


class ServedCalls:
    """Whom is asked. Another `seed`, other prompts."""

    def __init__(
        self,
        client: Client,
        target: Target,
        model: str,
        vocabulary: Vocabulary,
        now: Callable[[], float],
        seed: int = 0,
    ) -> None:
        self._client = client
        self._target = target
        self._model = model
        self._vocabulary = vocabulary
        self._now = now
        self._chance = random.Random(seed)

    def words(self, num_tokens: int) -> tuple[str, ...]:
        """A text that nobody has seen, for prompts to begin with."""
        return tuple(self._chance.choices(self._vocabulary.words, k=num_tokens))

    async def ask(
        self, num_prompt_tokens: int, num_output_tokens: int, beginning: tuple[str, ...] = ()
    ) -> Call:
        """A prompt that nobody has seen, but for its `beginning`. Raises NoAnswer for anything but a whole
        answer.
        """
        num_words = self._vocabulary.num_words(num_prompt_tokens) - len(beginning)
        words = (FIRST_WORD, *beginning, *self._chance.choices(self._vocabulary.words, k=num_words))
        body = request_body(self._target, self._model, [" ".join(words)], num_output_tokens)
        call = self._client.call(Ask(body, num_prompt_tokens, num_output_tokens), self._now())
        record = await call.run()
        if not record.is_completed:
            raise NoAnswer(f"a prompt of {num_prompt_tokens} tokens: {record.detail}")
        return call

    async def read(
        self, num_prompt_tokens: int, num_output_tokens: int, beginning: tuple[str, ...] = ()
    ) -> Told:
        """The same; what its answer tells."""
        call = await self.ask(num_prompt_tokens, num_output_tokens, beginning)
        return told_by(call, num_prompt_tokens)


def told_by(call: Call, num_tokens: int) -> Told:
    """Raises NoAnswer if the service explains nothing."""
    record = call.record
    assert record is not None
    assert record.ttft_s is not None
    about: Any = call.usage.get("baton")
    try:
        prompt = about["prompts"][0]
        queue_s, read_s = (float(prompt["ttft_ms"].get(name, 0.0)) / 1e3 for name in ("queue", "prefill"))
        is_local = prompt["plan"] == "local"
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer("the service does not tell where time went: router.explain must be on") from error
    first_at_s, num_cached = call.due_s + record.ttft_s, record.num_cached_tokens or 0
    return Told(num_tokens, call.due_s, first_at_s, queue_s, read_s, is_local, num_cached)


def records_of(calls: Sequence[Call]) -> list[RequestRecord]:
    return [call.record for call in calls if call.record is not None]


def all_streaming(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From when on, and until when, all of them stream: behind the second token of the last one."""
    first = max(record.event_times_s[min(1, len(record.event_times_s) - 1)] for record in records)
    return first, min(record.event_times_s[-1] for record in records)


def num_between(records: Sequence[RequestRecord], first: float, last: float) -> float:
    """Steps in that time: the tokens that a stream got, on average."""
    counts = [sum(first < when <= last for when in record.event_times_s) for record in records]
    return sum(counts) / len(counts)
