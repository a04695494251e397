"""Measures: what a run's streams amount to, medians over runs, and ratios between servers.

Owns the definitions. Time to first token counts from the moment at which a request was due, so connecting
and waiting for the server count. A gap lies between two events with text of one stream. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from benchmarks.streaming import Stream
from cluster.loadtest.goodput import percentile


class NoOverlap(Exception):
    """The streams that should have been interrupted ended too soon: the run shows nothing."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run, or the medians of several. Seconds; None where a run has no such value.

    `tokens_per_s`: output tokens of all streams from the first request to the last answer's end. For an
    interruption `ttft_p50` is the long prompt's, `itl_p50` is that of the running streams before it came, and
    `itl_p99` and `longest_gap` are those of the running streams while it was read and answered. `tpot_p50` is
    the median over streams of the mean time per token after the first: unlike `itl_p50` it does not fall when
    events arrive in bursts.
    """

    tokens_per_s: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    longest_gap: float | None
    tpot_p50: float | None = None

    @property
    def gap_ratio(self) -> float | None:
        """The longest gap in units of the median one."""
        return ratio(self.longest_gap, self.itl_p50)


def ratio(value: float | None, other: float | None) -> float | None:
    """`value / other`; None when one of them is missing or `other` is 0."""
    return None if value is None or not other else value / other


def gaps(times: Sequence[float]) -> list[float]:
    """The pauses between events that follow one another."""
    return [after - before for before, after in pairwise(times)]


def gaps_before(times: Sequence[float], moment: float) -> list[float]:
    """Those that were over at `moment`."""
    return [after - before for before, after in pairwise(times) if after <= moment]


def gaps_during(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Those of which any part lies between `begin` and `end`, in full length."""
    return [after - before for before, after in pairwise(times) if after > begin and before < end]


def summarize_batch(streams: Sequence[Stream]) -> Summary:
    """All streams of a batch, pooled."""
    waits = [stream.times[0] - stream.due_at for stream in streams]
    pauses = [gap for stream in streams for gap in gaps(stream.times)]
    return Summary(
        tokens_per_s=_tokens_per_s(streams),
        ttft_p50=percentile(waits, 50),
        ttft_p99=percentile(waits, 99),
        itl_p50=percentile(pauses, 50),
        itl_p99=percentile(pauses, 99),
        longest_gap=max(pauses, default=None),
        tpot_p50=_tpot_p50(streams),
    )


def summarize_interruption(running: Sequence[Stream], long: Stream) -> Summary:
    """What the arrival of `long` did to `running`, until `long` was answered in full.

    Raises NoOverlap when one of `running` ended before the first token of `long`.
    """
    first = long.times[0]
    if any(stream.times[-1] < first for stream in running):
        raise NoOverlap("a running stream ended before the long prompt's first token")
    before = [gap for stream in running for gap in gaps_before(stream.times, long.due_at)]
    during = [gap for stream in running for gap in gaps_during(stream.times, long.due_at, long.times[-1])]
    return Summary(
        tokens_per_s=_tokens_per_s([*running, long]),
        ttft_p50=first - long.due_at,
        ttft_p99=None,
        itl_p50=percentile(before, 50),
        itl_p99=percentile(during, 99),
        longest_gap=max(during, default=None),
        tpot_p50=_tpot_p50(running),
    )


def medians(summaries: Sequence[Summary]) -> Summary:
    """Each measure's median over the runs that have it."""
    found: dict[str, float | None] = {}
    for field in fields(Summary):
        values = [
            value for value in (getattr(summary, field.name) for summary in summaries) if value is not None
        ]
        found[field.name] = statistics.median(values) if values else None
    return Summary(**found)


def shares(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The part that each label has of what was counted between two readings; empty if nothing was."""
    counted = {label: count - before.get(label, 0.0) for label, count in after.items()}
    total = sum(counted.values())
    return {label: count / total for label, count in sorted(counted.items()) if count} if total else {}


def _tokens_per_s(streams: Sequence[Stream]) -> float | None:
    begin = min(stream.due_at for stream in streams)
    end = max(stream.ended_at for stream in streams)
    return ratio(sum(stream.num_output_tokens for stream in streams), end - begin)


def _tpot_p50(streams: Sequence[Stream]) -> float | None:
    means = [
        (stream.times[-1] - stream.times[0]) / (stream.num_output_tokens - 1)
        for stream in streams
        if stream.num_output_tokens > 1
    ]
    return percentile(means, 50)
