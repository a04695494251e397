"""Goodput: the rate of requests that were answered as promised, and the percentiles of a run.

Owns the definitions. A request is good if it was answered in full, with its first token within `ttft_s` of
the moment at which it was due and a mean time per further token within `itl_s` (DistServe, arXiv 2401.09670,
section 2). Refusals, errors and requests that the run's end cut off are never good, and have no part in any
latency. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.loadtest.record import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised; None promises nothing. `attainment`: the share of requests for which it must hold.
    `longest_pause_s` bounds each pause between two pieces, which a mean can hide.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    longest_pause_s: float | None = None
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment <= 1.0:
            raise ValueError(f"attainment must be above 0 and at most 1, not {self.attainment}")
        for name in ("ttft_s", "itl_s", "longest_pause_s"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be above 0, not {value}")

    def is_met_by(self, record: RequestRecord) -> bool:
        """An answer without a token is judged by its end."""
        if not record.is_completed:
            return False
        ttft = record.e2e_s if record.ttft_s is None else record.ttft_s
        is_in_time = _within(ttft, self.ttft_s) and _within(record.tpot_s, self.itl_s)
        if self.longest_pause_s is None or not is_in_time:
            return is_in_time
        return _within(record.longest_pause_s, self.longest_pause_s)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Interpolated between the two nearest ranks."""

    num_values: int
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run amounts to. Seconds; a measure that no request has is None.

    `offered_rps`, `goodput_rps`: requests due, and of them the good ones, per second of the window in which
    they were due. `attainment`: the good share of all that were due. Tokens per second: those of completed
    answers, from the first request due until the last answer's end. `pause`: between two pieces of an answer;
    `itl`: the same per token; `tpot`: each request's mean. `num_short`: complete answers with fewer tokens
    than were asked for. `num_wrong_prompts`: those of which the server read another number of prompt tokens.
    `num_uncounted`: those whose tokens it did not count, so that each event is taken for one.
    """

    num_requests: int
    num_completed: int
    num_refused: int
    num_errors: int
    num_unfinished: int
    num_short: int
    num_wrong_prompts: int
    num_uncounted: int
    window_s: float
    elapsed_s: float
    offered_rps: float
    completed_rps: float
    goodput_rps: float
    attainment: float
    ttft_attainment: float
    itl_attainment: float
    is_slo_met: bool
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_event: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    pause: Percentiles | None
    e2e: Percentiles | None
    send_lag: Percentiles | None


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None of nothing."""
    found = np.fromiter(values, dtype=np.float64)
    if not found.size:
        return None
    p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
    return Percentiles(int(found.size), p50, p90, p95, p99, float(found.max()))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated between the two nearest ranks; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


def summarize(records: Sequence[RequestRecord], slo: Slo, window_s: float) -> Summary:
    """`window_s`: how long requests were due, for instance their number over the offered rate; of a closed
    loop the time that it took. Raises ValueError for a window of no length.
    """
    if not window_s > 0.0:
        raise ValueError(f"window_s must be above 0, not {window_s}")
    kinds = Counter(record.outcome for record in records)
    completed = [record for record in records if record.is_completed]
    num_good = sum(slo.is_met_by(record) for record in records)
    elapsed_s = _elapsed_s(records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in completed)
    num_output_tokens = sum(record.num_output_tokens for record in completed)
    num_events = sum(len(record.event_times_s) for record in completed)
    attainment = num_good / len(records) if records else 0.0
    return Summary(
        num_requests=len(records),
        num_completed=len(completed),
        num_refused=kinds[Outcome.REFUSED],
        num_errors=kinds[Outcome.ERROR],
        num_unfinished=kinds[Outcome.UNFINISHED],
        num_short=sum(record.num_output_tokens < record.planned_output_tokens for record in completed),
        num_wrong_prompts=sum(
            record.has_usage and 0 < record.planned_prompt_tokens != record.num_prompt_tokens
            for record in completed
        ),
        num_uncounted=sum(not record.has_usage for record in completed),
        window_s=window_s,
        elapsed_s=elapsed_s,
        offered_rps=len(records) / window_s,
        completed_rps=len(completed) / window_s,
        goodput_rps=num_good / window_s,
        attainment=attainment,
        ttft_attainment=_share(Slo(ttft_s=slo.ttft_s), records),
        itl_attainment=_share(Slo(itl_s=slo.itl_s), records),
        is_slo_met=bool(records) and attainment >= slo.attainment,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=sum(record.num_cached_tokens for record in completed),
        input_tokens_per_s=_ratio(num_prompt_tokens, elapsed_s),
        output_tokens_per_s=_ratio(num_output_tokens, elapsed_s),
        tokens_per_event=_ratio(num_output_tokens, num_events),
        ttft=percentiles(record.ttft_s for record in completed if record.ttft_s is not None),
        itl=percentiles(gap for record in completed for gap in record.itl_s),
        tpot=percentiles(record.tpot_s for record in completed if record.tpot_s is not None),
        pause=percentiles(pause for record in completed for pause in record.pauses_s),
        e2e=percentiles(record.e2e_s for record in completed),
        send_lag=percentiles(record.send_lag_s for record in records),
    )


def _share(slo: Slo, records: Sequence[RequestRecord]) -> float:
    return sum(map(slo.is_met_by, records)) / len(records) if records else 0.0


def _elapsed_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.due_s for record in records)


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _ratio(value: float, other: float) -> float:
    return value / other if other > 0.0 else 0.0
