"""Speeds: how fast a worker computes and hands over, in milliseconds, as far as that was measured.

Owns what is assumed until then: of a worker that has not measured something, the average of those that have;
before anybody has, the configuration. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.worker_status import StepCost, WorkerStatus
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of a step: `decode + streams × stream + their KV tokens × kv`, with prompt tokens in it
    `prefill + tokens × token + pairs × pair` and what the streams add. See `StepCost`.
    """

    decode: float
    stream: float
    prefill: float
    token: float
    kv: float = 0.0
    pair: float = 0.0

    def decode_step(self, num_streams: int, num_kv_tokens: int = 0) -> float:
        return self.decode + self.stream * num_streams + self.kv * num_kv_tokens

    def times(self, factor: float) -> Speed:
        return Speed(
            self.decode * factor,
            self.stream * factor,
            self.prefill * factor,
            self.token * factor,
            self.kv * factor,
            self.pair * factor,
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """With the host's cores alone, and while another worker of the host computes."""

    alone: Speed
    beside: Speed

    def lost_share(self, num_streams: int) -> float:
        """The share of its progress that a worker loses while another computes beside: of decoding if it has
        streams, else of reading.
        """
        if num_streams:
            alone, beside = self.alone.decode_step(num_streams), self.beside.decode_step(num_streams)
        else:
            alone, beside = self.alone.token, self.beside.token
        return max(0.0, 1.0 - alone / beside) if beside > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a pair's handoff adds before the second token: milliseconds, and milliseconds per byte."""

    fixed: float
    per_byte: float


def assumed_speeds(config: RouterConfig, statuses: Iterable[WorkerStatus | None] = ()) -> Speeds:
    """Of a worker that has measured nothing, beside those whose `statuses` are known."""
    known = [status for status in statuses if status is not None]
    token = 1e3 / config.assumed_prefill_tokens_per_s
    default = Speed(config.assumed_step_s * 1e3, 0.0, 0.0, token)
    alone = _average([status.alone for status in known], default)
    beside = _average([status.beside for status in known], alone.times(config.assumed_core_sharing))
    return Speeds(alone, beside)


def measured_speeds(status: WorkerStatus | None, assumed: Speeds, config: RouterConfig) -> Speeds:
    """Of the worker that sent `status`; what it has not measured one way follows from the other way."""
    if status is None:
        return assumed
    sharing = config.assumed_core_sharing
    if not _is_complete(status.alone):
        alone = _filled(status.alone, _filled(status.beside, assumed.alone.times(sharing)).times(1 / sharing))
    else:
        alone = _filled(status.alone, assumed.alone)
    beside = _filled(status.beside, alone.times(sharing))
    # other programs may have slowed steps that ran "alone": some part of shared cores is lost for sure
    least = alone.times(math.sqrt(sharing))
    return Speeds(
        alone,
        Speed(
            max(beside.decode, least.decode),
            max(beside.stream, least.stream),
            max(beside.prefill, least.prefill),
            max(beside.token, least.token),
            max(beside.kv, least.kv),
            max(beside.pair, least.pair),
        ),
    )


def mean_speeds(speeds: Sequence[Speeds]) -> Speeds:
    """Of several workers that should be equally fast; one at least."""
    return Speeds(_mean_speed([each.alone for each in speeds]), _mean_speed([each.beside for each in speeds]))


def _mean_speed(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        *(
            _mean([getattr(each, name) for each in speeds])
            for name in ("decode", "stream", "prefill", "token", "kv", "pair")
        )
    )


def _is_complete(cost: StepCost) -> bool:
    return _can_decode(cost) and _can_read(cost)


def _can_decode(cost: StepCost) -> bool:
    return cost.decode_s + cost.stream_s + cost.kv_s > 0.0


def _can_read(cost: StepCost) -> bool:
    return cost.prefill_s + cost.token_s + cost.pair_s > 0.0


def _filled(cost: StepCost, rest: Speed) -> Speed:
    source = Speed(cost.decode_s, cost.stream_s, cost.prefill_s, cost.token_s, cost.kv_s, cost.pair_s)
    own = source.times(1e3)
    decoding, reading = own if _can_decode(cost) else rest, own if _can_read(cost) else rest
    return Speed(decoding.decode, decoding.stream, reading.prefill, reading.token, decoding.kv, reading.pair)


def _average(costs: list[StepCost], rest: Speed) -> Speed:
    decoding = [cost for cost in costs if _can_decode(cost)]
    reading = [cost for cost in costs if _can_read(cost)]
    mean = StepCost(
        _mean([cost.decode_s for cost in decoding]),
        _mean([cost.stream_s for cost in decoding]),
        _mean([cost.prefill_s for cost in reading]),
        _mean([cost.token_s for cost in reading]),
        _mean([cost.kv_s for cost in decoding]),
        _mean([cost.pair_s for cost in reading]),
    )
    return _filled(mean, rest)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
