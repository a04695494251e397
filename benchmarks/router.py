"""Placement policies side by side on a real trace: goodput, hit rate, latencies, and who starves.

`python -m benchmarks.router [--trace mooncake_conversation.jsonl.gz]` simulates the same workers with the
same caches under each policy and looks for its goodput: the highest rate at which at least 90 % of the
requests meet both SLOs (DistServe, arXiv 2401.09670, section 2), among multiples of the trace's rate.
Beside it the peak of rate × attainment. `--speed` runs some multiples instead. The trace is a Mooncake one,
whose ids of 512-token blocks say what prompts share (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0);
it is looked for in the folder that BATON_TRACES names, too. Its times are rounded to 3 s, over which requests
are spread evenly.

The other routers' settings were tuned by `--tune` on the first part of the trace (`TUNING`); ours has its
defaults. What is reported is from another part (`TEST`), behind requests that fill the caches and do not
count. `--impair` loses, delays and disorders the events that tell of cached blocks. `--aggregated`: every
worker reads and decodes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.highest_rate import Search, Steps
from benchmarks.placement_policies import Policy as Policy
from benchmarks.placement_policies import grid, policies
from cluster.loadtest.goodput import Slo, Summary, summarize
from cluster.loadtest.traces import TraceRecord, read_trace
from cluster.simulator.deployment import Deployment
from cluster.simulator.pools import SiteReport
from cluster.simulator.simulation import Simulation
from cluster.simulator.step_price import LinkPrice, StepPrice
from cluster.simulator.teller import Way
from cluster.simulator.workload import arrivals_of
from core.kv_layout import KVLayout
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import PlanSetting, RouterConfig

TRACE = "mooncake_conversation.jsonl.gz"
SLO = Slo(ttft_s=4.0, itl_s=0.05)
TUNING, TEST, NUM_WARM_UP = slice(0, 1500), slice(6000, 7500), 500
NUM_WORKERS = 8

# An 8B model in bfloat16 on one 80 GB GPU of 989 TFLOP/s and 3.35 TB/s, at half of the one and 80 % of the
# other: 16 GB of weights are read in 6 ms, a token of a prompt takes 16 GFLOP, and attention
# 2 × 2 × 32 × 4096 FLOP for each pair; KV of 128 KiB a token. 56 GB are left for KV.
PRICE = StepPrice(fixed_s=0.007, token_s=32e-6, pair_s=1.1e-9, stream_s=20e-6, kv_s=49e-9)
LAYOUT = KVLayout("8b", num_layers=32, num_kv_heads=8, head_dim=128, block_size=512, dtype="bfloat16")
KV_TOKENS = 430_000
LINK = LinkPrice(bytes_per_s=25e9)  # 200 Gbit/s

IMPAIRED = (
    ("10 % lost", Way(loss=0.1, is_for_load=False)),
    ("1 s late", Way(delay_s=1.0, is_for_load=False)),
    (
        "10 % lost, 1 to 2 s late, out of order",
        Way(delay_s=1.0, jitter_s=1.0, loss=0.1, is_for_load=False),
    ),
    ("the same, and so is the load", Way(delay_s=1.0, jitter_s=1.0, loss=0.1)),
)


def deployment(policy: Policy, is_aggregated: bool, way: Way) -> Deployment:
    half = NUM_WORKERS // 2
    return Deployment(
        layout=LAYOUT,
        num_blocks=KV_TOKENS // LAYOUT.block_size,
        price=PRICE,
        link=LINK,
        num_prefill=0 if is_aggregated else half,
        num_decode=NUM_WORKERS if is_aggregated else half,
        prefill=PrefillConfig(token_budget=8192),
        decode=DecodeConfig(max_num_seqs=128, token_budget=2048, prefill_chunk=512),
        router=RouterConfig(
            policy=policy.setting,
            plan=PlanSetting.LOCAL if is_aggregated else PlanSetting.AUTO,
            pull_timeout_s=0.0,
            ttft_target_s=SLO.ttft_s,
        ),
        way=way,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One run. `hit_rate`: of all prompt tokens; `least_share`, `most_share`: the time that the least and the
    most busy worker of a role computed, by the mean of its role.
    """

    summary: Summary
    hit_rate: float
    least_share: float
    most_share: float
    plans: Counter[str]
    took_s: float

    @property
    def is_slo_met(self) -> bool:
        return self.summary.is_slo_met

    @property
    def goodput_rps(self) -> float:
        return self.summary.goodput_rps

    def __str__(self) -> str:
        summary = self.summary
        ttft, tpot = summary.ttft, summary.tpot
        assert ttft is not None
        assert tpot is not None
        plans = " ".join(f"{name} {count}" for name, count in sorted(self.plans.items()))
        return (
            f"good {summary.goodput_rps:5.2f}/s ({summary.attainment:6.1%} of {summary.offered_rps:4.1f}/s)  "
            f"hits {self.hit_rate:5.1%}  TTFT p50 {ttft.p50:6.2f} p99 {ttft.p99:6.2f} s  "
            f"ITL p50 {tpot.p50 * 1e3:4.1f} p99 {tpot.p99 * 1e3:5.1f} ms  "
            f"least {self.least_share:4.2f} most {self.most_share:4.2f}  [{plans}] "
            f"{summary.num_errors} errors, {self.took_s:.0f} s"
        )


def run(records: Sequence[TraceRecord], speed: float, policy: Policy, is_aggregated: bool, way: Way) -> Line:
    """One policy on one part of the trace at one rate."""
    began = time.process_time()
    arrivals = arrivals_of(records, speed, spread_s=3.0)
    start = arrivals[0].arrival_s
    arrivals = [replace(item, arrival_s=item.arrival_s - start) for item in arrivals]
    chooser = policy.make() if policy.make is not None else None
    simulation = Simulation(deployment(policy, is_aggregated, way), chooser=chooser)
    outcome = simulation.play(arrivals)
    counted = outcome.records[NUM_WARM_UP:]
    window_s = arrivals[-1].arrival_s - arrivals[NUM_WARM_UP].arrival_s
    summary = summarize([record.result() for record in counted], SLO, window_s)
    shares = busy_shares(outcome.sites)
    return Line(
        summary,
        sum(record.num_cached_tokens for record in counted) / sum(r.num_prompt_tokens for r in counted),
        min(shares),
        max(shares),
        Counter(record.plan for record in counted),
        time.process_time() - began,
    )


def busy_shares(sites: Sequence[SiteReport]) -> list[float]:
    """Who starves: how long each worker computed, by the mean of its role."""
    shares = []
    for role in {site.role for site in sites}:
        busy = [site.busy_s for site in sites if site.role == role]
        shares += [each * len(busy) / sum(busy) if sum(busy) else 0.0 for each in busy]
    return shares


def find_trace(given: Path | None) -> Path | None:
    folder = os.environ.get("BATON_TRACES")
    for path in (given, Path(folder) / TRACE if folder else None):
        if path is not None and path.exists():
            return path
    return None


def search(
    records: Sequence[TraceRecord], policy: Policy, is_aggregated: bool, steps: Steps, has_lines: bool
) -> Search[Line]:
    """Looks for its goodput; prints each run, if asked to."""

    def measure(speed: float) -> Line:
        line = run(records, speed, policy, is_aggregated, Way())
        if has_lines:
            print(f"  x{speed:<7g} {policy.name:26} {line}", flush=True)
        return line

    found = Search(measure, steps)
    found.go()
    return found


def told(policy: Policy, found: Search[Line]) -> str:
    """The line of a policy: its goodput, and what is behind it."""
    peak = found.peak
    best = f"peak {found.found[peak].goodput_rps:5.2f}/s at x{peak:<5g}"
    if found.highest is None:
        least = min(found.found)
        return f"{policy.name:26} goodput none  {best}  at x{least:g}: {found.found[least]}"
    line = found.found[found.highest]
    return (
        f"{policy.name:26} goodput {line.summary.offered_rps:5.2f}/s at x{found.highest:<7g} {best}  {line}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; default: in the folder BATON_TRACES")
    parser.add_argument("--speed", type=float, nargs="*", help="these multiples of the trace's rate alone")
    parser.add_argument("--from", dest="start", type=float, default=2.0, help="where the search begins")
    parser.add_argument("--lines", action="store_true", help="each run of the search, too")
    parser.add_argument("--only", nargs="*", help="policies whose names begin so")
    parser.add_argument("--aggregated", action="store_true", help="every worker reads and decodes")
    parser.add_argument("--tune", action="store_true", help="try the grid on the tuning part")
    parser.add_argument("--impair", action="store_true", help="ours, with events lost, late and unordered")
    parser.add_argument("--tuning-part", action="store_true", help="the policies on the tuning part")
    options = parser.parse_args()
    if options.impair and not options.speed:
        parser.error("--impair needs --speed")
    return options


def main() -> int:
    options = parse()
    path = find_trace(options.trace)
    if path is None:
        print(f"skipped: no trace. Give --trace, or set BATON_TRACES to a folder that holds {TRACE}")
        return 0
    records = read_trace(path)[TUNING if options.tune or options.tuning_part else TEST]
    is_aggregated = options.aggregated
    tried = list(grid(is_aggregated)) if options.tune else policies(is_aggregated)
    if options.impair:
        tried = [Policy("ours")]
    if options.only:
        tried = [policy for policy in tried if any(policy.name.startswith(name) for name in options.only)]
    if not options.speed:
        for policy in tried:
            found = search(records, policy, is_aggregated, Steps(start=options.start), options.lines)
            print(told(policy, found), flush=True)
        return 0
    ways = [("", Way()), *IMPAIRED] if options.impair else [("", Way())]
    for speed in options.speed:
        for policy, (name, way) in itertools.product(tried, ways):
            line = run(records, speed, policy, is_aggregated, way)
            print(f"x{speed:<7g} {name or policy.name:32} {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
