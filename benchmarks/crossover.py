"""Prefill and decode apart, or each worker both: which serves more of a real trace within its SLO, and from
where on.

`python -m benchmarks.crossover [--workers 8] [--speed 1 1.5 2 2.5]` plays a part of the conversation trace at
several multiples of its rate (trace, workers and prices: see `benchmarks.router`) against so many workers,
all of them both or some of them prefill only, and judges each run by several SLOs. It prints what share of
the requests kept each, then for each SLO the highest rate that 90 % of the requests keep (between two
rates that were run: a straight line) and which split has it: where the better side changes is the crossover.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.router import NUM_WARM_UP, TEST, Policy, deployment, find_trace
from cluster.loadtest.goodput import Slo, summarize
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.traces import TraceRecord, read_trace
from cluster.simulator.simulation import Simulation
from cluster.simulator.teller import Way
from cluster.simulator.workload import arrivals_of

SLOS = tuple(Slo(ttft_s, itl_s) for ttft_s in (2.0, 4.0, 10.0) for itl_s in (0.015, 0.02, 0.03, 0.05))
SPEEDS = (0.75, 1.25, 1.75, 2.25, 2.75)
ATTAINMENT = 0.9

Curve = dict[float, float]
"""Share of the requests that keep an SLO, by requests a second."""


def told(slo: Slo) -> str:
    assert slo.ttft_s is not None
    assert slo.itl_s is not None
    return f"{slo.ttft_s:g} s, {1e3 * slo.itl_s:g} ms"


def play(
    records: Sequence[TraceRecord], speed: float, num_prefill: int, num_workers: int
) -> tuple[list[RequestRecord], float]:
    """What counts of one run, and its seconds. `num_prefill` 0: every worker reads and decodes."""
    arrivals = arrivals_of(records, speed, spread_s=3.0)
    start = arrivals[0].arrival_s
    arrivals = [replace(item, arrival_s=item.arrival_s - start) for item in arrivals]
    workers = replace(
        deployment(Policy("ours"), num_prefill == 0, Way()),
        num_prefill=num_prefill,
        num_decode=num_workers - num_prefill,
    )
    outcome = Simulation(workers).play(arrivals)
    counted = [record.result() for record in outcome.records[NUM_WARM_UP:]]
    return counted, arrivals[-1].arrival_s - arrivals[NUM_WARM_UP].arrival_s


def highest(curve: Curve) -> float:
    """The highest rate that is kept: up to the first one that is not, and on a line towards it."""
    kept, share = 0.0, 1.0
    for rate, attained in sorted(curve.items()):
        if attained < ATTAINMENT:
            return kept + (rate - kept) * (share - ATTAINMENT) / (share - attained)
        kept, share = rate, attained
    return kept


def table(curves: Mapping[Slo, Mapping[str, Curve]]) -> None:
    """For each SLO the highest rate of each split."""
    names = list(next(iter(curves.values())))
    print("| SLO | " + " | ".join(names) + " | best |")
    print("| --- |" + " ---: |" * len(names) + " --- |")
    for slo, by_name in curves.items():
        rates = {name: highest(curve) for name, curve in by_name.items()}
        apart = max((name for name in names if name != names[0]), key=lambda name: rates[name])
        ratio = rates[apart] / rates[names[0]] if rates[names[0]] else float("inf")
        cells = " | ".join(
            f"{'≥ ' if rate == max(by_name[name]) else ''}{rate:.2f}" for name, rate in rates.items()
        )
        best = f"{apart}, {ratio:.2f} ×" if ratio > 1.0 else f"{names[0]} ({apart}: {ratio:.2f} ×)"
        print(f"| {told(slo)} | {cells} | {best} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; default: in the folder BATON_TRACES")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument(
        "--prefill", type=int, nargs="*", help="how many prefill workers; default: a half ± 1"
    )
    parser.add_argument(
        "--speed", type=float, nargs="*", default=SPEEDS, help="multiples of the trace's rate"
    )
    options = parser.parse_args()
    path = find_trace(options.trace)
    if path is None:
        print("skipped: no trace. Give --trace, or set BATON_TRACES to the folder that holds it")
        return 0
    records = read_trace(path)[TEST]
    half = options.workers // 2
    splits = {f"{options.workers} both": 0}
    for num_prefill in options.prefill or (half - 1, half, half + 1):
        splits[f"{num_prefill} + {options.workers - num_prefill}"] = num_prefill
    curves: dict[Slo, dict[str, Curve]] = {slo: {name: {} for name in splits} for slo in SLOS}
    for speed in options.speed:
        for name, num_prefill in splits.items():
            began = time.process_time()
            counted, window_s = play(records, speed, num_prefill, options.workers)
            rate, shares = len(counted) / window_s, []
            for slo in SLOS:
                share = summarize(counted, slo, window_s).attainment
                curves[slo][name][rate] = share
                shares.append(f"{told(slo)}: {share:.0%}")
            took_s = time.process_time() - began
            print(f"{rate:5.2f}/s {name:8} {'; '.join(shares)} ({took_s:.0f} s)", flush=True)
    table(curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
