"""StepPrice: what a step takes, in place of the tensors that would take it. LinkPrice: what a transfer takes.

Owns the arithmetic and the features it is linear in, so that measured steps can be fitted to it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from engine.step import StepPlan

_SIZE = attrgetter("num_streams")

Features = tuple[float, float, float, float, float]
"""Of a step: 1, prompt tokens, (prompt token, earlier token) pairs that attend, streams, their KV tokens."""


@dataclass(frozen=True, slots=True)
class BatchPrice:
    """Of steps of `num_streams` streams and no prompt: `fixed_s`, and `kv_s` for each KV token of theirs."""

    num_streams: float
    fixed_s: float
    kv_s: float

    def __post_init__(self) -> None:
        for name in ("num_streams", "fixed_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be above 0")
        if not self.kv_s >= 0.0:
            raise ValueError("kv_s must not be negative")

    def seconds(self, kv_tokens: float) -> float:
        return self.fixed_s + self.kv_s * kv_tokens


@dataclass(frozen=True, slots=True)
class StepPrice:
    """Seconds. A step takes `fixed_s` (weights are read, kernels started) and `token_s` for each prompt
    token, `pair_s` for each pair of a prompt token and one before it, `stream_s` for each stream and `kv_s`
    for each token of KV that streams attend to. `batches`, in the order of their sizes: what steps of streams
    alone take, where that is no line (two rows of a matrix may cost as much as one). Batches between two of
    them cost what lies between; those beyond, what the line says more.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    stream_s: float
    kv_s: float
    batches: tuple[BatchPrice, ...] = ()

    def __post_init__(self) -> None:
        sizes = [batch.num_streams for batch in self.batches]
        if sizes != sorted(set(sizes)):
            raise ValueError("batches must be in the order of their sizes")
        for name in ("fixed_s", "token_s", "pair_s", "stream_s", "kv_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must not be negative")
        if self.fixed_s + self.token_s <= 0.0 or self.fixed_s + self.stream_s <= 0.0:
            raise ValueError("a step must take some time")

    def seconds(self, features: Features) -> float:
        one, tokens, pairs, streams, kv_tokens = features
        if self.batches and not tokens and streams:
            return self._of_streams(streams, kv_tokens)
        return (
            self.fixed_s * one
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.stream_s * streams
            + self.kv_s * kv_tokens
        )

    def _of_streams(self, streams: float, kv_tokens: float) -> float:
        batches = self.batches
        above = bisect_left(batches, streams, key=_SIZE)
        if above == len(batches):
            last = batches[-1]
            return last.seconds(kv_tokens) + self.stream_s * (streams - last.num_streams)
        upper = batches[above]
        if above == 0:
            return upper.seconds(kv_tokens)
        lower = batches[above - 1]
        share = (streams - lower.num_streams) / (upper.num_streams - lower.num_streams)
        return (1.0 - share) * lower.seconds(kv_tokens) + share * upper.seconds(kv_tokens)


@dataclass(frozen=True, slots=True)
class LinkPrice:
    """KV between two workers: `bytes_per_s` out of one and into the other at a time, and `latency_s` for a
    message, in either direction.
    """

    bytes_per_s: float
    latency_s: float = 0.0005

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0:
            raise ValueError("bytes_per_s must be above 0")
        if not self.latency_s >= 0.0:
            raise ValueError("latency_s must not be negative")


def features_of(plan: StepPlan) -> Features:
    """What the price of a step depends on. A chunk of one token costs what a stream does."""
    tokens, pairs, streams, kv_tokens = 0, 0.0, len(plan.streams), 0
    if streams:
        kv_tokens = int(plan.streams.num_tokens.sum())
    for item in plan.chunks:
        num_new, num_context = item.num_scheduled_tokens, item.num_context_tokens
        if num_new == 1:
            streams += 1
            kv_tokens += num_context + 1
        else:
            tokens += num_new
            pairs += num_new * (num_context + 0.5 * num_new)
    return 1.0, float(tokens), pairs, float(streams), float(kv_tokens)
