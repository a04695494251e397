"""Baton against other servers: workloads A to D on one machine, one markdown table of medians and ratios.

`python -m benchmarks.peers --servers FILE --tokenizer FOLDER` starts the servers that FILE names one after
the other, lets each run all workloads, stops it, and repeats the whole `--repeats` times, beginning with
another server each time, so that a slow minute of the machine does not fall on one server only. FILE is
described in `servers`, and `peers.example.yaml` is one; the workloads are in `workloads`, the measures in
`measures`. A stream that is cut short, a token too few, or a server that does not start is a failure: it is
named below the table, it has no result, and the exit status is 1. `--out` keeps each run as a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from benchmarks.load import placements, run, run_batch
from benchmarks.measures import NoOverlap, shares
from benchmarks.report import Results, configuration, machine, table
from benchmarks.servers import ServerSpec, StartFailed, command_line, load_specs, running, version_of
from benchmarks.streaming import BrokenStream, Endpoint
from benchmarks.workloads import Prompts, Workload, make_workload, warm_up

_FAULTS = (BrokenStream, NoOverlap, OSError, TimeoutError, StartFailed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is run. `runs` of each workload for each start of a server, `repeats` starts of each server."""

    prompts: Prompts
    workloads: Sequence[Workload]
    repeats: int
    runs: int
    logs: Path
    out: Path | None

    async def measure(self, results: Sequence[Results]) -> None:
        """Adds to `results`, one for each server."""
        for repeat in range(self.repeats):
            first = repeat % len(results)
            for result in [*results[first:], *results[:first]]:
                await self._measure_server(result, repeat)

    async def _measure_server(self, result: Results, repeat: int) -> None:
        spec = result.spec
        load = os.getloadavg()[0]
        tell(f"{spec.name}, repeat {repeat + 1} of {self.repeats}, load average {load:.1f}")
        try:
            async with running(spec, self.logs / f"{spec.name}.log") as endpoint:
                tell(shlex.join(command_line(spec, endpoint.port)))
                batches = [await run_batch(endpoint, batch) for batch in warm_up(self.prompts)]
                result.sample = batches[0][0].text
                for workload in self.workloads:
                    if spec.runs(workload):
                        await self._measure_workload(result, workload, endpoint, repeat)
        except* _FAULTS as group:
            _fail(result, None, group)

    async def _measure_workload(
        self, result: Results, workload: Workload, endpoint: Endpoint, repeat: int
    ) -> None:
        for index in range(repeat * self.runs, (repeat + 1) * self.runs):
            work = make_workload(workload, self.prompts, index)
            try:
                before = await placements(endpoint)
                summary = await run(endpoint, work)
                plans = shares(before, await placements(endpoint))
            except* _FAULTS as group:
                _fail(result, workload, group)
            else:
                result.add(workload, summary, plans)
                self._keep(
                    {
                        "server": result.spec.name,
                        "workload": workload.value,
                        "run": index,
                        **asdict(summary),
                        "plans": plans,
                        "load_average": os.getloadavg()[0],
                    }
                )

    def _keep(self, row: Mapping[str, object]) -> None:
        line = orjson.dumps(row).decode()
        tell(line)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")


def _fail(result: Results, workload: Workload | None, group: BaseExceptionGroup[BaseException]) -> None:
    """Note the first of the errors; the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = f"{type(error).__name__}: {error}"
    tell(f"{result.spec.name}: {text}")
    result.failures.setdefault(workload, []).append(text.splitlines()[0])


def tell(text: str) -> None:
    """Progress goes to the error stream: the table alone is the output."""
    print(text, file=sys.stderr, flush=True)


def chosen(specs: Sequence[ServerSpec], only: Sequence[str]) -> list[ServerSpec]:
    """Those named in `only`, or all. Raises ValueError for a name that the file does not have."""
    unknown = set(only) - {spec.name for spec in specs}
    if unknown:
        raise ValueError(f"no such server: {', '.join(sorted(unknown))}")
    return [spec for spec in specs if not only or spec.name in only]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=Path, required=True, help="YAML file of servers")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder with the model's tokenizer.json"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="servers, all if not given")
    parser.add_argument("--workloads", default="ABCD", help="letters")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each server")
    parser.add_argument("--runs", type=int, default=1, help="runs of each workload for each start")
    parser.add_argument("--logs", type=Path, help="folder for the servers' output (a new one if not given)")
    parser.add_argument("--out", type=Path, help="file to which each run is added as a line of JSON")
    options = parser.parse_args()
    specs = chosen(load_specs(options.servers), options.only)
    workloads = [Workload(letter) for letter in options.workloads]
    logs: Path = options.logs or Path(tempfile.mkdtemp(prefix="peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    tell(f"logs: {logs}")
    results = [Results(spec, version_of(spec)) for spec in specs]
    prompts = Prompts(options.tokenizer / "tokenizer.json")
    settings = {
        **machine(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
        "repeats × runs": f"{options.repeats} × {options.runs}",
    }
    comparison = Comparison(prompts, workloads, options.repeats, options.runs, logs, options.out)
    # On SIGINT asyncio cancels, and so the server is stopped. A shell's background jobs ignore it from birth,
    # and SIGTERM would leave the server running.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    asyncio.run(comparison.measure(results))
    print(table(results, workloads), configuration(results, settings), sep="\n\n")
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
