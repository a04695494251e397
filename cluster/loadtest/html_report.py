"""The report as one page of HTML that needs nothing else: verdict, numbers, plots, steps, settings.

Owns what stands where; the plots are `plots`', the look is `report_style`'s. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from cluster.loadtest.goodput import Percentiles, Summary
from cluster.loadtest.plots import distribution_plot, load_timeline, rate_plot, ttft_timeline
from cluster.loadtest.report import LoadReport, Step
from cluster.loadtest.report_style import STYLE
from cluster.loadtest.verdict import duration

_LEGEND = (
    ("blue", "good"),
    ("amber", "complete, SLO missed"),
    ("grey", "refused or unfinished"),
    ("red", "error"),
)


def render_html(report: LoadReport) -> str:
    """All text of the report is escaped: a server's words cannot become part of the page."""
    body = "\n".join(_sections(report))
    title = escape(report.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>\n{body}\n</main></body></html>\n"
    )


def _sections(report: LoadReport) -> Iterator[str]:
    step = report.steps[report.detail.step]
    yield f"<h1>{escape(report.title)}</h1>"
    about = f"{report.started_at} · {report.took_s:.0f} s · {report.tool}"
    yield f'<div class="soft">{escape(about)}</div>'
    yield _verdict(report)
    yield _warnings(report.verdict.warnings)
    yield f'<div class="tiles">{"".join(_tiles(step.summary))}</div>'
    yield f'<div class="cards">{"".join(_cards(report, step))}</div>'


def _verdict(report: LoadReport) -> str:
    verdict = report.verdict
    css, word = ("pass", "passed") if verdict.has_passed else ("fail", "failed")
    return (
        f'<div class="verdict {css}"><span class="word">{word}</span>'
        f"<strong>{escape(verdict.headline)}</strong>{_listed(verdict.reasons)}</div>"
    )


def _warnings(warnings: Sequence[str]) -> str:
    return f'<div class="warnings"><b>Read with care</b>{_listed(warnings)}</div>' if warnings else ""


def _tiles(summary: Summary) -> Iterator[str]:
    def tile(value: str, name: str) -> str:
        return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'

    yield tile(f"{summary.goodput_rps:.3g}/s", f"good requests, of {summary.offered_rps:.3g}/s offered")
    yield tile(f"{summary.attainment:.1%}", "of requests were good")
    for name, found in (("TTFT", summary.ttft), ("ITL", summary.itl)):
        if found is not None:
            yield tile(f"{duration(found.p50)} · {duration(found.p99)}", f"{name} p50 · p99")
    yield tile(f"{summary.output_tokens_per_s:.0f} tok/s", f"out, {summary.input_tokens_per_s:.0f} tok/s in")
    yield tile(f"{summary.num_refused} · {summary.num_errors}", "refused · errors")


def _cards(report: LoadReport, step: Step) -> Iterator[str]:
    detail, slo, summary = report.detail, report.slo, step.summary
    shown = f" at {step.name}" if len(report.steps) > 1 else ""
    if sum(one.rate is not None for one in report.steps) > 1:
        goodput = report.search.goodput_rps if report.search is not None else None
        yield _card("Rate and goodput", rate_plot(report.steps, goodput) + _rate_note(report), "wide")
    ttft = distribution_plot("time to first token", detail.ttft, summary.ttft, slo.ttft_s, "requests")
    yield _card(f"Time to first token{shown}", ttft)
    itl = distribution_plot("inter-token latency", detail.itl, summary.itl, slo.itl_s, "gaps")
    yield _card(f"Inter-token latency{shown}", itl)
    every = f" (each {detail.every}th request)" if detail.every > 1 else ""
    yield _card(f"Requests over time{shown}{every}", _legend() + ttft_timeline(detail, slo))
    yield _card(f"Open requests{shown}{every}", load_timeline(detail))
    yield _card(f"Percentiles{shown}", _percentile_table(summary), "wide")
    if len(report.steps) > 1:
        yield _card("Steps", _step_table(report.steps), "wide")
    yield _card("Settings", _pairs(report.configuration))
    yield _card("Where it ran", _pairs((("model", report.model), *report.machine)))


def _rate_note(report: LoadReport) -> str:
    reason = f" The search ended: {report.search.reason}." if report.search is not None else ""
    text = f"Dashed: every offered request is good. Blue dots keep the SLO, amber ones do not.{reason}"
    return f'<div class="soft">{escape(text)}</div>'


def _percentile_table(summary: Summary) -> str:
    heads = ("", "p50", "p90", "p95", "p99", "largest", "values")
    rows: list[Iterable[str]] = []
    for name, found in (
        ("time to first token", summary.ttft),
        ("inter-token latency", summary.itl),
        ("mean ITL of a request", summary.tpot),
        ("pause between two pieces", summary.pause),
        ("whole answer", summary.e2e),
        ("send lag", summary.send_lag),
    ):
        if found is not None:
            rows.append((name, *_times(found), str(found.num_values)))
    return _table(heads, rows)


def _times(found: Percentiles) -> list[str]:
    return [duration(value) for value in (found.p50, found.p90, found.p95, found.p99, found.largest)]


def _step_table(steps: Sequence[Step]) -> str:
    heads = ("step", "SLO", "good", "goodput/s", "TTFT p50", "p99", "ITL p50", "p99", "tok/s")
    rows = [
        (
            step.name + (" (stopped early)" if step.is_cut_short else ""),
            "kept" if step.has_passed else "missed",
            f"{step.summary.attainment:.1%} of {step.summary.num_requests}",
            f"{step.summary.goodput_rps:.3g}",
            *_ends(step.summary.ttft),
            *_ends(step.summary.itl),
            f"{step.summary.output_tokens_per_s:.0f}",
            f"{step.summary.num_refused} · {step.summary.num_errors}",
            "–" if step.load_average is None else f"{step.load_average:.1f}",
        )
        for step in steps
    ]
    table = _table((*heads, "refused · errors", "load"), rows)
    kept, missed = '<td class="yes">kept</td>', '<td class="no">missed</td>'
    return table.replace("<td>kept</td>", kept).replace("<td>missed</td>", missed)


def _ends(found: Percentiles | None) -> tuple[str, str]:
    return ("–", "–") if found is None else (duration(found.p50), duration(found.p99))


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(
        f'<tr><td class="soft">{escape(name)}</td><td>{escape(value)}</td></tr>' for name, value in pairs
    )
    return f'<table class="pairs">{lines}</table>'


def _listed(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _legend() -> str:
    marks = "".join(
        f'<span><i style="background: var(--{colour})"></i>{escape(name)}</span>' for colour, name in _LEGEND
    )
    return f'<div class="legend">{marks}</div>'


def _card(title: str, inner: str, css: str = "") -> str:
    return f'<section class="card {css}"><h2>{escape(title)}</h2>{inner}</section>'
