"""The verdict: whether a load test has passed, in one sentence, with its reasons and what to be wary of.

Owns the rules and the words. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.loadtest.goodput import Slo, Summary
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.report import SearchOutcome, Step, Verdict

_MAX_LAG_S = 0.05
_FEW = 30
_MANY_AT_ONCE = 1.2
_MAX_EXAMPLES = 3
# of the rate, and in standard deviations of a Poisson count, that fewer requests may be due
_MISSING_SHARE, _MISSING_DEVIATIONS = 0.1, 3.0


def has_passed(summary: Summary, max_error_share: float) -> bool:
    """Within the SLO, and not too many errors. Refusals are no errors, but no good answers either."""
    return summary.is_slo_met and error_share(summary) <= max_error_share


def error_share(summary: Summary) -> float:
    return summary.num_errors / summary.num_requests if summary.num_requests else 0.0


def judge(
    step: Step,
    records: Sequence[RequestRecord],
    slo: Slo,
    max_error_share: float,
    search: SearchOutcome | None,
) -> Verdict:
    """Of the step that is shown; with a search, of what it found."""
    reasons = _reasons(step.summary, slo, max_error_share, records)
    headline = _single_headline(step, slo) if search is None else _search_headline(search, step, slo)
    passed = step.has_passed if search is None else search.goodput_rps is not None
    return Verdict(passed, headline, tuple(reasons), tuple(warnings_of(step, slo)))


def promise(slo: Slo) -> str:
    """The SLO in words."""
    limits = (
        ("TTFT", slo.ttft_s),
        ("mean ITL", slo.itl_s),
        ("longest pause", slo.longest_pause_s),
    )
    parts = [f"{name} ≤ {duration(limit)}" for name, limit in limits if limit is not None]
    return f"{slo.attainment:.0%} of requests with " + (", ".join(parts) or "a complete answer")


def duration(seconds: float | None) -> str:
    """For people: `1.25 s`, `37 ms`, `0.4 ms`."""
    if seconds is None:
        return "–"
    if seconds >= 1.0:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _single_headline(step: Step, slo: Slo) -> str:
    summary = step.summary
    kept = "kept" if summary.is_slo_met else "missed"
    return (
        f"SLO {kept}: {summary.attainment:.1%} of {summary.num_requests} requests were good "
        f"({slo.attainment:.0%} wanted); goodput {summary.goodput_rps:.3g} requests/s "
        f"of {summary.offered_rps:.3g} offered"
    )


def _search_headline(search: SearchOutcome, step: Step, slo: Slo) -> str:
    if search.goodput_rps is None:
        return f"No rate keeps the SLO: {search.reason}"
    above = "" if search.failing_rps is None else f"; {search.failing_rps:.3g} does not"
    return f"Goodput {search.goodput_rps:.3g} requests/s: the highest rate that keeps the SLO{above}"


def _reasons(
    summary: Summary, slo: Slo, max_error_share: float, records: Sequence[RequestRecord]
) -> list[str]:
    found = [f"SLO: {promise(slo)}"]
    if slo.ttft_s is not None:
        found.append(f"TTFT within {duration(slo.ttft_s)}: {summary.ttft_attainment:.1%} of requests")
    if slo.itl_s is not None:
        found.append(f"mean ITL within {duration(slo.itl_s)}: {summary.itl_attainment:.1%} of requests")
    counts = f"{summary.num_completed} complete, {summary.num_refused} refused (429, 503), "
    found.append(f"{counts}{summary.num_errors} errors, {summary.num_unfinished} unfinished at the end")
    if error_share(summary) > max_error_share:
        found.append(f"too many errors: {error_share(summary):.1%}, {max_error_share:.1%} allowed")
    kinds = Counter(record.detail for record in records if record.outcome is Outcome.ERROR)
    found += [f"{count} × {detail}" for detail, count in kinds.most_common(_MAX_EXAMPLES)]
    return found


def warnings_of(step: Step, slo: Slo) -> list[str]:
    """What makes the numbers less than they seem."""
    summary, found = step.summary, []
    if step.is_cut_short:
        found.append("the run was stopped once the SLO could not be kept any more; its numbers are partial")
    if summary.num_completed < _FEW:
        found.append(f"only {summary.num_completed} complete answers: percentiles say little")
    if step.rate is not None and not step.is_cut_short:
        planned = step.rate * summary.window_s
        missing = planned - summary.num_requests
        if missing > max(_MISSING_SHARE * planned, _MISSING_DEVIATIONS * planned**0.5):
            found.append(
                f"{summary.offered_rps:.3g} requests/s were due, not {step.rate:.3g}: later turns come after "
                "answers, and not after the window; a trace has quiet parts"
            )
    lag = summary.send_lag
    if lag is not None and lag.p99 > max(_MAX_LAG_S, 0.05 * (slo.ttft_s or 0.0)):
        found.append(
            f"the sender was late, by {duration(lag.p99)} at the 99th percentile; latencies include it"
        )
    if summary.num_short:
        found.append(f"{summary.num_short} answers had fewer tokens than were asked for")
    if summary.num_wrong_prompts:
        found.append(
            f"{summary.num_wrong_prompts} prompts were read as another number of tokens than planned"
        )
    if summary.num_uncounted:
        found.append(f"{summary.num_uncounted} answers came without a count of tokens: each event is one")
    elif summary.tokens_per_event > _MANY_AT_ONCE:
        found.append(
            f"{summary.tokens_per_event:.1f} tokens came in one event on average: ITL is each pause divided "
            "by the tokens of an event; a reader sees the pauses"
        )
    return found
