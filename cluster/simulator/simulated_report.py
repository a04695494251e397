"""The report of a simulation, in the form of a load test's.

Owns what is said of a run that nobody had to wait for. Pure but for the clock of its date.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from cluster.loadtest.goodput import Slo, summarize
from cluster.loadtest.report import FORMAT, LoadReport, Step, flattened, make_detail
from cluster.loadtest.verdict import has_passed, judge
from cluster.simulator.deployment import Deployment
from cluster.simulator.simulation import Outcome
from cluster.simulator.workload import Arrival


def simulated_report(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    outcome: Outcome,
    slo: Slo,
    warm_up_s: float,
    took_s: float,
    max_error_share: float = 0.01,
) -> LoadReport:
    """Requests that came in the first `warm_up_s` do not count. Raises ValueError if no other ones did."""
    records = [record.result() for record in outcome.records]
    counted = [record for record in records if record.due_s >= warm_up_s]
    if len(counted) < 2:
        raise ValueError(f"fewer than two requests came after the warm-up of {warm_up_s:g} s")
    window_s = max(arrivals[-1].arrival_s - warm_up_s, 1e-3)
    summary = summarize(counted, slo, window_s)
    rate = len(counted) / window_s
    step = Step(
        name=f"{rate:.3g} requests/s",
        rate=rate,
        concurrency=None,
        has_passed=has_passed(summary, max_error_share),
        is_cut_short=False,
        load_average=None,
        summary=summary,
    )
    return LoadReport(
        format=FORMAT,
        title=f"Simulation of {deployment.num_prefill} prefill and {deployment.num_decode} decode workers",
        tool=f"baton {importlib.metadata.version('baton')}",
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=round(took_s, 3),
        model=deployment.layout.model,
        configuration=tuple(flattened(asdict(deployment))),
        machine=tuple(
            (
                site.worker_id,
                f"busy {site.busy_s / max(outcome.ended_s, 1e-9):.0%} in {site.num_steps} steps, "
                f"{site.num_hit_tokens} of {site.num_query_tokens} prompt tokens cached",
            )
            for site in outcome.sites
        ),
        slo=slo,
        steps=(step,),
        detail=make_detail(0, records, slo, warm_up_s),
        search=None,
        verdict=judge(step, counted, slo, max_error_share, None),
    )
