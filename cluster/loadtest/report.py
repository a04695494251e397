"""LoadReport: a load test as it is kept, as JSON.

Owns the form and reading it back strictly; the judgement is made in `verdict`, the picture in `html_report`.
The simulator makes the same report. Pure but for reading and writing the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from cluster.loadtest.goodput import Slo, Summary
from cluster.loadtest.record import Outcome, RequestRecord
from core.config import from_mapping
from core.errors import InvalidConfig

FORMAT = 1
MAX_ROWS = 20_000
_FEWEST_BINS, _MOST_BINS = 6, 40
_SMALLEST_S = 1e-4  # what a clock between two processes can tell apart


@dataclass(frozen=True, slots=True)
class Step:
    """One run at one rate. `rate` None: a closed loop. `load_average`: of the sending machine at its end."""

    name: str
    rate: float | None
    concurrency: int | None
    has_passed: bool
    is_cut_short: bool
    load_average: float | None
    summary: Summary


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values lie between `edges_s[i]` and `edges_s[i + 1]`; the edges are equal ratios apart."""

    edges_s: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Moments and durations in seconds; see RequestRecord."""

    due_s: float
    send_lag_s: float
    e2e_s: float
    ttft_s: float | None
    tpot_s: float | None
    longest_pause_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    outcome: Outcome
    is_good: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Detail:
    """One step request by request, the warm-up included: `rows`, each `every`-th of them. The histograms
    are those of the complete answers after the warm-up.
    """

    step: int
    warm_up_s: float
    every: int
    ttft: Histogram
    itl: Histogram
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """`goodput_rps`: the highest rate that passed, `failing_rps`: the lowest that failed; None if none."""

    goodput_rps: float | None
    failing_rps: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`warnings`: what a reader must know before believing the numbers."""

    has_passed: bool
    headline: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """`configuration`, `machine`: names and values, as they are shown."""

    format: int
    title: str
    tool: str
    started_at: str
    took_s: float
    model: str
    configuration: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, str], ...]
    slo: Slo
    steps: tuple[Step, ...]
    detail: Detail
    search: SearchOutcome | None
    verdict: Verdict


def make_detail(
    step: int, records: Sequence[RequestRecord], slo: Slo, warm_up_s: float, max_rows: int = MAX_ROWS
) -> Detail:
    """Of many requests every second, third, … one has a row."""
    every = max(1, -(-len(records) // max_rows))
    counted = [record for record in records if record.is_completed and record.due_s >= warm_up_s]
    return Detail(
        step=step,
        warm_up_s=warm_up_s,
        every=every,
        ttft=histogram(record.ttft_s for record in counted if record.ttft_s is not None),
        itl=histogram(gap for record in counted for gap in record.itl_s),
        rows=tuple(_row(record, slo) for record in records[::every]),
    )


def histogram(values_s: Iterable[float]) -> Histogram:
    """Durations in bins of equal ratio; empty of nothing."""
    values = np.maximum(np.fromiter(values_s, dtype=np.float64), _SMALLEST_S)
    if not values.size:
        return Histogram((), ())
    low, high = float(values.min()) * 0.999, float(values.max()) * 1.001
    num_bins = int(min(max(values.size**0.5, _FEWEST_BINS), _MOST_BINS))
    edges = np.geomspace(low, high, num_bins + 1)
    counts, _ = np.histogram(values, edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def flattened(values: Mapping[str, Any], where: str = "") -> list[tuple[str, str]]:
    """`{"a": {"b": 1}}` is `[("a.b", "1")]`; what is None is left out."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{where}.{key}" if where else key
        if isinstance(value, Mapping):
            found += flattened(value, name)
        elif value is not None:
            found.append((name, str(value)))
    return found


def to_json(report: LoadReport) -> bytes:
    return orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2)


def from_json(data: bytes) -> LoadReport:
    """Raises InvalidConfig naming what is wrong with it."""
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidConfig(f"the report is not JSON: {error}", key="report") from error
    report = from_mapping(LoadReport, tree, "report")
    if report.format != FORMAT:
        raise InvalidConfig(f"report.format is {report.format}, but must be {FORMAT}", key="report.format")
    return report


def write_report(report: LoadReport, path: Path) -> None:
    path.write_bytes(to_json(report))


def _row(record: RequestRecord, slo: Slo) -> Row:
    return Row(
        due_s=round(record.due_s, 5),
        send_lag_s=round(record.send_lag_s, 5),
        e2e_s=round(record.e2e_s, 5),
        ttft_s=_rounded(record.ttft_s),
        tpot_s=_rounded(record.tpot_s),
        longest_pause_s=_rounded(record.longest_pause_s),
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=record.num_cached_tokens,
        outcome=record.outcome,
        is_good=slo.is_met_by(record),
        detail=record.detail,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
