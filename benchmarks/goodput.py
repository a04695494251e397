"""Goodput of several servers under one SLO: the highest rate that each keeps, by `baton loadtest --search`.

`python -m benchmarks.goodput --servers FILE --out FOLDER -- --slo-ttft 2 --slo-itl 0.2` starts the servers of
FILE one after the other (see `servers`; `goodput.example.yaml` is one), measures each with the same arguments
and stops it. What follows `--` is given to `baton loadtest` as it is; a server's own `loadtest` is added. The
table is markdown; reports are kept in FOLDER. A server without a result is named below the table, and the
exit status is 1. Each server has its own start, so a slow minute of the machine may fall on one of them: the
load average stands in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import chosen, tell
from benchmarks.report import machine
from benchmarks.servers import ServerSpec, StartFailed, load_specs, running, version_of
from benchmarks.streaming import HOST, Endpoint
from cluster.loadtest.goodput import Percentiles
from cluster.loadtest.report import LoadReport, from_json
from cluster.loadtest.verdict import duration
from cluster.loadtest_command import EXIT_FAILED

_HEADS = (
    *("server", "weights", "goodput req/s", "fails at", "good", "TTFT p50 / p99", "mean ITL p50 / p99"),
    *("out tok/s", "refused · errors", "requests", "load average"),
)


async def measure(spec: ServerSpec, arguments: Sequence[str], out: Path) -> LoadReport:
    """Start, measure, stop. Raises StartFailed, also when the test gave no result."""
    async with running(spec, out / f"{spec.name}.log") as endpoint:
        command = _command(spec, endpoint, arguments, out / spec.name)
        tell(shlex.join(command))
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
        status = await process.wait()
    if status not in (0, EXIT_FAILED):
        raise StartFailed(f"{spec.name}: baton loadtest ended with status {status}")
    return from_json((out / spec.name / "report.json").read_bytes())


def _command(spec: ServerSpec, endpoint: Endpoint, arguments: Sequence[str], out: Path) -> list[str]:
    baton = str(Path(sys.executable).with_name("baton"))
    where = ["--url", f"http://{HOST}:{endpoint.port}", "--model", endpoint.model, "--out", str(out)]
    return [baton, "loadtest", *where, "--search", *arguments, *shlex.split(spec.loadtest)]


def row(spec: ServerSpec, report: LoadReport) -> str:
    """Of the highest step that keeps the SLO, else of the last one."""
    step, found = report.steps[report.detail.step], report.search
    assert found is not None, "a search was asked for"
    summary = step.summary
    loads = [step.load_average for step in report.steps if step.load_average is not None]
    cells = (
        spec.name,
        spec.weights,
        "none" if found.goodput_rps is None else f"{found.goodput_rps:.2f}",
        "–" if found.failing_rps is None else f"{found.failing_rps:.2f}",
        f"{summary.attainment:.0%}",
        _pair(summary.ttft),
        _pair(summary.tpot),
        f"{summary.output_tokens_per_s:.0f}",
        f"{summary.num_refused} · {summary.num_errors}",
        f"{sum(one.summary.num_requests for one in report.steps)} in {len(report.steps)} steps",
        f"{min(loads):.1f}–{max(loads):.1f}" if loads else "–",
    )
    return "| " + " | ".join(cells) + " |"


def _pair(found: Percentiles | None) -> str:
    return "–" if found is None else f"{duration(found.p50)} / {duration(found.p99)}"


async def _measure_all(specs: Sequence[ServerSpec], arguments: Sequence[str], out: Path) -> list[str]:
    """Prints the table as it grows; returns what failed."""
    failures = []
    print("| " + " | ".join(_HEADS) + " |", "|" + " --- |" * len(_HEADS), sep="\n", flush=True)
    for spec in specs:
        try:
            print(row(spec, await measure(spec, arguments, out)), flush=True)
        except (StartFailed, OSError) as error:
            failures.append(str(error))
    return failures


def main() -> int:
    own, arguments = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, arguments = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=Path, required=True, help="YAML file of servers")
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and logs")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="servers, all if not given")
    options = parser.parse_args(own)
    specs = chosen(load_specs(options.servers), options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    failures = asyncio.run(_measure_all(specs, arguments, options.out))
    print(f"\n`baton loadtest --search {shlex.join(arguments)}`")
    print(*(f"- {name}: {value}" for name, value in machine().items()), sep="\n")
    print(*(f"- {spec.name}: {version_of(spec)} `{spec.command.strip()}`" for spec in specs), sep="\n")
    print(*(f"- FAILED {failure}" for failure in failures), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
