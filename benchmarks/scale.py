"""How long a simulation of many workers takes on one core.

`python -m benchmarks.scale [--workers 100] [--requests 100000] [--aggregated]` plays the conversation trace
against so many workers (trace, workers and prices: see `benchmarks.router`) and prints one line. The trace
has 12,031 requests: more of them are copies of it, all at once, that share no prompt with another copy. The
rate grows with the workers: `--rate` requests a second for each. Processor time is that of this process,
which computes on one core only.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.router import SLO, Policy, deployment, find_trace
from cluster.loadtest.goodput import summarize
from cluster.loadtest.traces import TraceRecord, read_trace
from cluster.simulator.simulation import Simulation
from cluster.simulator.teller import Way
from cluster.simulator.workload import Arrival, arrivals_of

_SPREAD_S = 3.0
NUM_TOLD = 40


def copies(records: Sequence[TraceRecord], num_requests: int) -> list[TraceRecord]:
    """So many requests: the trace's, as often as it takes, each time with ids of its own."""
    num_ids = 1 + max(max(record.block_ids) for record in records)
    num_copies = -(-num_requests // len(records))
    taken = records[: -(-num_requests // num_copies)]
    return [
        replace(record, block_ids=tuple(copy * num_ids + block_id for block_id in record.block_ids))
        for copy in range(num_copies)
        for record in taken
    ][:num_requests]


def arrivals_at(records: Sequence[TraceRecord], rate: float) -> list[Arrival]:
    """The requests from second 0 on, `rate` each second."""
    found = arrivals_of(records, 1.0, _SPREAD_S)
    start, end = found[0].arrival_s, found[-1].arrival_s
    speed = rate / (len(found) / (end - start))
    return [replace(item, arrival_s=(item.arrival_s - start) / speed) for item in found]


def tell(index: int, began: float) -> None:
    """How far it has come."""
    print(f"{index} requests: {time.process_time() - began:.0f} s of processor", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; default: in the folder BATON_TRACES")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second for each worker")
    parser.add_argument("--aggregated", action="store_true", help="every worker reads and decodes")
    options = parser.parse_args()
    path = find_trace(options.trace)
    if path is None:
        print("skipped: no trace. Give --trace, or set BATON_TRACES to the folder that holds it")
        return 0
    num_workers, is_aggregated = options.workers, options.aggregated
    arrivals = arrivals_at(copies(read_trace(path), options.requests), options.rate * num_workers)
    num_prefill = 0 if is_aggregated else num_workers // 2
    workers = replace(
        deployment(Policy("ours"), is_aggregated, Way()),
        num_prefill=num_prefill,
        num_decode=num_workers - num_prefill,
    )
    # what is there stays; garbage in cycles is rare, and looking for it among millions of objects is not free
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    simulation = Simulation(workers)
    began = time.process_time()
    for index in range(0, len(arrivals), max(1, len(arrivals) // NUM_TOLD))[1:]:
        simulation.events.at(arrivals[index].arrival_s, tell, index, began)
    outcome = simulation.play(arrivals)
    took_s = time.process_time() - began
    summary = summarize([record.result() for record in outcome.records], SLO, arrivals[-1].arrival_s)
    num_steps = sum(site.num_steps for site in outcome.sites)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{num_workers} workers ({num_prefill} read only), {len(arrivals)} requests: {took_s:.0f} s of "
        f"processor ({1e3 * took_s / len(arrivals):.2f} ms a request), {mib:.0f} MiB; simulated "
        f"{outcome.ended_s:.0f} s, {outcome.num_events} events, {num_steps} steps; good "
        f"{summary.attainment:.1%} of {summary.offered_rps:.1f}/s, {summary.num_errors} errors",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
