"""The plots of a report: distributions, the timeline, rate against goodput.

Owns what each shows; drawing belongs to `svg`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from cluster.loadtest.goodput import Percentiles, Slo
from cluster.loadtest.record import Outcome
from cluster.loadtest.report import Detail, Histogram, Row, Step
from cluster.loadtest.svg import NARROW, WIDE, Frame, make_frame, plain
from cluster.loadtest.verdict import duration

_MAX_DOTS = 4000


def distribution_plot(
    name: str, found: Histogram, marks: Percentiles | None, limit_s: float | None, what: str
) -> str:
    """Bars over a logarithmic time axis, with median, 99th percentile and what was promised."""
    if marks is None or not found.counts:
        return '<p class="none">nothing to show</p>'
    low, high = found.edges_s[0], found.edges_s[-1]
    if limit_s is not None:
        low, high = min(low, limit_s * 0.8), max(high, limit_s * 1.25)
    frame = make_frame((low, high), (0.0, max(found.counts) * 1.35), (NARROW, 270), "xn")
    parts = [frame.axes(name, f"{what} per bin", _tick_text, plain)]
    for (begin, end), count in zip(pairwise(found.edges_s), found.counts, strict=True):
        if count:
            title = f"{count} between {duration(begin)} and {duration(end)}"
            middle = (begin * end) ** 0.5
            css = "bar over" if limit_s is not None and middle > limit_s else "bar"
            parts.append(frame.bar(begin, end, count, css, title))
    parts.append(frame.upright(marks.p50, "mark", f"p50 {duration(marks.p50)}"))
    parts.append(frame.upright(marks.p99, "mark", f"p99 {duration(marks.p99)}", row=1))
    if limit_s is not None:
        parts.append(frame.upright(limit_s, "limit", f"SLO {duration(limit_s)}", row=2))
    return frame.drawn(*parts, title=f"distribution of {name}")


def ttft_timeline(detail: Detail, slo: Slo) -> str:
    """Each request at the moment it was due: its time to first token, or that it had none."""
    rows = _thinned(detail.rows)
    times = [row.ttft_s for row in rows if row.ttft_s is not None and row.outcome is Outcome.COMPLETED]
    if not rows:
        return '<p class="none">nothing to show</p>'
    bounds = [*times, *([slo.ttft_s] if slo.ttft_s is not None else [])] or [1.0]
    last = max(row.due_s for row in rows)
    low, high = max(min(bounds) * 0.8, 1e-4), max(max(bounds) * 1.6, 2e-4)
    frame = make_frame((0.0, last), (low, high), (NARROW, 270), "y")
    parts = [frame.axes("seconds since the start, when due", "TTFT", plain, _tick_text)]
    if 0.0 < detail.warm_up_s < last:
        parts.append(frame.upright(detail.warm_up_s, "mark", "counted from here"))
    parts += [_request_dot(frame, row, high) for row in rows]
    if slo.ttft_s is not None:
        parts.append(frame.level(slo.ttft_s, "limit", f"SLO {duration(slo.ttft_s)}"))
    return frame.drawn(*parts, title="time to first token over time")


def load_timeline(detail: Detail) -> str:
    """How many requests were open at each moment."""
    rows = detail.rows
    if not rows:
        return '<p class="none">nothing to show</p>'
    changes = sorted([(row.due_s, 1) for row in rows] + [(row.due_s + row.e2e_s, -1) for row in rows])
    counts = [count * detail.every for count in accumulate(change for _, change in changes)]
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for (moment, _), count in zip(changes, counts, strict=True):
        points += [(moment, points[-1][1]), (moment, float(count))]
    frame = make_frame((0.0, points[-1][0]), (0.0, max(counts) * 1.1), (NARROW, 294), "n")
    return frame.drawn(
        frame.axes("seconds since the start", "open requests", plain, plain),
        frame.area(points, "fill"),
        frame.line(points, "curve"),
        title="open requests over time",
    )


def rate_plot(steps: Sequence[Step], goodput_rps: float | None) -> str:
    """Offered rate against good requests per second, one dot a step; the dashed line is all of them."""
    found = sorted((step for step in steps if step.rate is not None), key=lambda step: step.rate or 0.0)
    if not found:
        return '<p class="none">nothing to show</p>'
    top = max(step.rate or 0.0 for step in found) * 1.08
    height = max(max(step.summary.completed_rps for step in found), top * 0.6)
    frame = make_frame((0.0, top), (0.0, min(top, height * 1.15)), (WIDE, 320))
    edge = min(top, frame.y.high)
    parts = [
        frame.axes("offered requests/s", "good requests/s", plain, plain),
        frame.line([(0.0, 0.0), (edge, edge)], "ideal"),
    ]
    if goodput_rps is not None:
        parts.append(frame.upright(goodput_rps, "mark", f"goodput {goodput_rps:.3g}/s"))
    parts.append(frame.line([(step.rate or 0.0, step.summary.goodput_rps) for step in found], "curve"))
    for step in found:
        words = "keeps the SLO" if step.has_passed else "does not keep the SLO"
        title = f"{step.name}: {step.summary.attainment:.1%} good, {words}"
        css = "good" if step.has_passed else "missed"
        parts.append(frame.dot(step.rate or 0.0, step.summary.goodput_rps, css, title, radius=5))
    return frame.drawn(*parts, title="goodput by offered rate")


def _request_dot(frame: Frame, row: Row, top: float) -> str:
    title = f"due {row.due_s:.2f} s, {row.num_prompt_tokens} in, {row.num_output_tokens} out"
    if row.outcome is Outcome.COMPLETED and row.ttft_s is not None:
        css = "good" if row.is_good else "missed"
        return frame.dot(row.due_s, row.ttft_s, css, f"{title}, TTFT {duration(row.ttft_s)}")
    css = {Outcome.REFUSED: "refused", Outcome.UNFINISHED: "unfinished"}.get(row.outcome, "error")
    return frame.dot(row.due_s, top, css, f"{title}: {row.outcome.value} {row.detail[:120]}", radius=3.4)


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Few enough to draw."""
    return rows[:: max(1, -(-len(rows) // _MAX_DOTS))]


def _tick_text(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
