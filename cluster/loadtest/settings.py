"""Settings of a load test.

Owns their defaults and which of them make sense together; where they come from belongs to the command line. A
fault is a ValueError or InvalidConfig that names the setting. Immutable, and plain enough to travel as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from cluster.loadtest.goodput import Slo


class Api(StrEnum):
    """Which of OpenAI's interfaces is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class StreamEnd(StrEnum):
    """How a complete stream ends: with `[DONE]`, as OpenAI's do, or, for servers that leave it out, at the
    end of the HTTP body after a finish reason.
    """

    DONE = "done"
    FINISH = "finish"


class ArrivalKind(StrEnum):
    """`CLOSED`: a fixed number of clients, each sending when its last answer has ended. `TRACE`: the
    trace's own times, scaled.
    """

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    CLOSED = "closed"
    TRACE = "trace"


class WorkloadKind(StrEnum):
    """`RANDOM`: prompts share nothing. `TRACE`: lengths and shared blocks of a trace."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked. `model` None: the first that the server lists. `extra_body`: JSON that is merged into
    each request, where null takes a field away. `tokenizer`: a tokenizer.json, for a server that counts no
    prompt tokens.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api: Api = Api.COMPLETIONS
    extra_body: str = "{}"
    stream_end: StreamEnd = StreamEnd.DONE
    timeout_s: float = 300.0
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {self.timeout_s}")
        self.more_body()

    def more_body(self) -> dict[str, Any]:
        """`extra_body` as a mapping."""
        try:
            found = json.loads(self.extra_body)
        except ValueError as error:
            raise ValueError(f"extra_body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError("extra_body must be a JSON object")
        return found


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come. `rate`: requests per second. `cv`: standard deviation over mean of the gaps of
    `GAMMA`; 1 is Poisson, more is burstier. `speed`: how many times as fast a trace is replayed.
    """

    kind: ArrivalKind = ArrivalKind.POISSON
    rate: float | None = None
    cv: float = 2.0
    concurrency: int = 1
    speed: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "cv", "concurrency", "speed")
        if self.rate is not None:
            _check_positive(self, "rate")

    @property
    def is_closed(self) -> bool:
        return self.kind is ArrivalKind.CLOSED


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"a range must begin at 1 or later and not end before, not {self.low}:{self.high}"
            )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. `prompt`: tokens that a request does not share with others, in a conversation those of
    each turn; `output`: tokens of an answer. `prefix_tokens` stand before each prompt of `SHARED_PREFIX` (one
    of `num_prefixes` texts) and `MULTI_TURN`. `think_s`: from an answer's end to the next turn.
    `length_scale` shortens a trace's prompts and answers; `max_context`: requests of a trace that are longer
    in all are left out.
    """

    kind: WorkloadKind = WorkloadKind.RANDOM
    prompt: Range = field(default_factory=lambda: Range(128, 128))
    output: Range = field(default_factory=lambda: Range(32, 32))
    prefix_tokens: int = 512
    num_prefixes: int = 1
    turns: Range = field(default_factory=lambda: Range(4, 4))
    think_s: float = 1.0
    trace: Path | None = None
    length_scale: float = 1.0
    max_context: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_prefixes", "length_scale")
        if self.prefix_tokens < 0 or self.think_s < 0:
            raise ValueError("prefix_tokens and think_s must not be below 0")
        if self.kind is WorkloadKind.TRACE and self.trace is None:
            raise ValueError("trace: the workload is a trace, but no file is given")


@dataclass(frozen=True, slots=True)
class Window:
    """For how long requests are due: `duration_s`, or until `num_requests` were sent. Those of the first
    `warm_up_s` are sent and not counted; `drain_s` is the time that answers have after the last one is due.
    """

    duration_s: float = 60.0
    num_requests: int | None = None
    warm_up_s: float = 0.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        _check_positive(self, "duration_s")
        if self.num_requests is not None:
            _check_positive(self, "num_requests")
        if self.warm_up_s < 0 or self.drain_s < 0:
            raise ValueError("warm_up_s and drain_s must not be below 0")
        if self.num_requests is None and self.warm_up_s >= self.duration_s:
            raise ValueError("warm_up_s must be less than duration_s: nothing would be counted")


@dataclass(frozen=True, slots=True)
class Search:
    """For the highest rate within the SLO. `start` None: estimated from one request alone. A step counts at
    least `min_requests`; the answer is known once passing and failing rate are within `precision` (0.1 is a
    tenth). `lowest` None: an eighth of the first rate. No step begins after `max_seconds`.
    """

    start: float | None = None
    lowest: float | None = None
    highest: float = 10_000.0
    precision: float = 0.1
    max_steps: int = 16
    max_seconds: float = 1800.0
    min_requests: int = 30

    def __post_init__(self) -> None:
        _check_positive(self, "highest", "precision", "max_steps", "max_seconds", "min_requests")
        for name in ("start", "lowest"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= self.highest:
                raise ValueError(f"{name} must lie between 0 and {self.highest:g}, not at {value}")


@dataclass(frozen=True, slots=True)
class LoadTestSettings:
    """All of it. `max_error_share`: more errors than that fail the test. One `seed` gives one workload: the
    same lengths, texts and times.
    """

    target: Target = field(default_factory=Target)
    arrivals: Arrivals = field(default_factory=Arrivals)
    workload: Workload = field(default_factory=Workload)
    window: Window = field(default_factory=Window)
    slo: Slo = field(default_factory=Slo)
    search: Search | None = None
    max_error_share: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        is_traced = self.workload.kind is WorkloadKind.TRACE
        if self.arrivals.kind is ArrivalKind.TRACE and not is_traced:
            raise ValueError("arrivals: a trace's times need a trace as workload")
        needs_rate = self.arrivals.kind not in (ArrivalKind.CLOSED, ArrivalKind.TRACE) and self.search is None
        if needs_rate and self.arrivals.rate is None:
            raise ValueError(f"rate: {self.arrivals.kind.value} arrivals need one, or a search for it")
        if self.search is not None:
            if self.arrivals.is_closed:
                raise ValueError("search: a closed loop has no rate to search for")
            if self.slo == Slo(attainment=self.slo.attainment):
                raise ValueError("search: what rate is the highest depends on an SLO; none is given")
        if not 0.0 <= self.max_error_share <= 1.0:
            raise ValueError(f"max_error_share must lie between 0 and 1, not at {self.max_error_share}")


def _check_positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise ValueError(f"{name} must be above 0, not {value}")
