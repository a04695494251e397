"""Play seeds: `python -m tests.simulation FIRST [LAST]`; prints what failed, exits with 1 if any did."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulation.chain_model import Oracle
from tests.simulation.scenario import scenario_of
from tests.simulation.world import play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="inclusive; the first alone if not given")
    options = parser.parse_args()
    last = options.first if options.last is None else options.last
    if last > options.first:
        logging.disable(logging.ERROR)  # workers log each trouble; one seed's is worth reading
    oracle, counts, num_broken, began_at = Oracle(), Counter[str](), 0, time.perf_counter()
    for seed in range(options.first, last + 1):
        report = play(scenario_of(seed), oracle)
        counts.update(complete=report.num_complete, errors=report.num_errors, troubles=report.num_troubles)
        counts.update(tokens=report.num_tokens, **report.plans)
        if report.broken:
            num_broken += 1
            print(f"seed {seed}:", *report.broken, sep="\n  ", flush=True)
    seconds = time.perf_counter() - began_at
    print(f"{last - options.first + 1} seeds, {num_broken} broken, {seconds:.0f} s:", dict(counts))
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
