"""StepPrice: what a step takes, in place of the tensors that would take it. LinkPrice: what a transfer takes.

Owns the arithmetic and the features it is linear in, so that measured steps can be fitted to it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.step import StepPlan

Features = tuple[float, float, float, float, float]
"""Of a step: 1, prompt tokens, (prompt token, earlier token) pairs that attend, streams, their KV tokens."""


@dataclass(frozen=True, slots=True)
class StepPrice:
    """Seconds. A step takes `fixed_s` (weights are read, kernels started) and `token_s` for each prompt
    token, `pair_s` for each pair of a prompt token and one before it, `stream_s` for each stream and `kv_s`
    for each token of KV that streams attend to.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    stream_s: float
    kv_s: float

    def __post_init__(self) -> None:
        for name in ("fixed_s", "token_s", "pair_s", "stream_s", "kv_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must not be negative")
        if self.fixed_s + self.token_s <= 0.0 or self.fixed_s + self.stream_s <= 0.0:
            raise ValueError("a step must take some time")

    def seconds(self, features: Features) -> float:
        one, tokens, pairs, streams, kv_tokens = features
        return (
            self.fixed_s * one
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.stream_s * streams
            + self.kv_s * kv_tokens
        )


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
