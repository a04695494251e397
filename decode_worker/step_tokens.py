"""StepTokens: one step's tokens of many streams, handed to the IO loop as one object.

Columns only; nothing is made for each token on the step thread. A value: made on the step thread, read on the
IO loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from core.jobs import GenerateEvent
from core.request import TokenDelta, TokenLogprob
from decode_worker.stream import PlainToken, Stream


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """Row i is the token at output index `positions[i]` of a sample of `streams[i]` that goes on after it.

    `logprobs` holds, by row, those of the requests that asked.
    """

    streams: list[Stream]
    sample_indices: list[int]
    positions: list[int]
    token_ids: list[int]
    num_cached_tokens: list[int]
    logprobs: Mapping[int, TokenLogprob]

    def rows(self) -> Iterator[tuple[Stream, GenerateEvent | PlainToken]]:
        """Each token with its stream."""
        tokens = zip(self.sample_indices, self.positions, self.token_ids, self.num_cached_tokens, strict=True)
        if not self.logprobs:
            yield from zip(self.streams, tokens, strict=True)
            return
        for row, (stream, token) in enumerate(zip(self.streams, tokens, strict=True)):
            logprob = self.logprobs.get(row)
            yield stream, token if logprob is None else _event(token, logprob)


def _event(token: PlainToken, logprob: TokenLogprob) -> GenerateEvent:
    sample_index, position, token_id, num_cached_tokens = token
    return GenerateEvent(TokenDelta(sample_index, position, (token_id,), (logprob,), None, num_cached_tokens))
