"""Reports of a made-up server: one queue, a fixed time for each prompt, then a token at a time."""

from __future__ import annotations

import random

from cluster.loadtest.goodput import Slo, summarize
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.report import FORMAT, LoadReport, SearchOutcome, Step, make_detail
from cluster.loadtest.verdict import has_passed, judge
from tests.unit.cluster.loadtest.records import record

SLO = Slo(ttft_s=1.0, itl_s=0.06)
PREFILL_S = 0.2
WINDOW_S = 60.0


def queue_records(rate: float, seed: int = 0, refused_share: float = 0.0) -> list[RequestRecord]:
    """Poisson arrivals of a minute at a server that reads five prompts a second."""
    chance = random.Random(seed)
    free_s = due_s = 0.0
    found: list[RequestRecord] = []
    while (due_s := due_s + chance.expovariate(rate)) < WINDOW_S:
        if chance.random() < refused_share:
            found.append(record(due_s, outcome=Outcome.REFUSED, ended_s=due_s, detail="status 429: busy"))
            continue
        free_s = max(free_s, due_s) + PREFILL_S * chance.uniform(0.7, 1.3)
        times = [free_s]
        for _ in range(30):
            times.append(times[-1] + chance.lognormvariate(-3.4, 0.4))
        found.append(record(due_s, *times, index=len(found), num_prompt_tokens=128, planned_output_tokens=31))
    return found


def make_report(*rates: float, refused_share: float = 0.0) -> LoadReport:
    """With several rates as a search has it; the best one is shown."""
    steps, kept = [], []
    for rate in rates:
        records = queue_records(rate, refused_share=refused_share)
        summary = summarize(records, SLO, WINDOW_S)
        passed = has_passed(summary, 0.01)
        steps.append(Step(f"{rate:g} requests/s", rate, None, passed, False, 1.5, summary))
        kept.append(records)
    passing = [step.rate for step in steps if step.has_passed and step.rate is not None]
    failing = [step.rate for step in steps if not step.has_passed and step.rate is not None]
    best = max(passing, default=None)
    shown = 0 if best is None else next(i for i, step in enumerate(steps) if step.rate == best)
    search = None
    if len(rates) > 1:
        search = SearchOutcome(best, min(failing, default=None), "passing and failing rate are within 10%")
    return LoadReport(
        format=FORMAT,
        title="Load test of a-model",
        tool="baton 0",
        started_at="2026-01-01T00:00:00+00:00",
        took_s=61.0,
        model="a-model",
        configuration=(("arrivals.kind", "poisson"), ("workload.prompt.low", "128")),
        machine=(("cores", "2"), ("load average before", "0.10")),
        slo=SLO,
        steps=tuple(steps),
        detail=make_detail(shown, kept[shown], SLO, 5.0),
        search=search,
        verdict=judge(steps[shown], kept[shown], SLO, 0.01, search),
    )
