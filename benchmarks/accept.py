"""Acceptance: everything that must be shown, in full, and one table of the results.

Runs the grids of `tests/accept` and all end-to-end tests, the slow ones included. A test that measures
something reports rows of its own; the others are counted by module. `--markdown FILE` writes the table for
docs/benchmarks.md. Exit status: that of the tests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
POINTS = {
    "cases/": "f",
    "test_right_tokens": "b",
    "test_seeded_sampling": "c",
    "test_ways": "b",
    "test_on_ray": "d",
    "test_bridge_faults": "d",
    "test_waste": "e",
    "test_shared_memory": "d",
    "test_peers": "-",
    "test_kill": "g",
    "test_storm": "g",
    "test_resume": "g",
    "test_aborts": "g",
    "test_pull": "d",
    "test_stopped_worker": "g",
    "test_partition": "g",
    "test_overload": "h",
    "test_tenants_apart": "g",
    "test_command": "a",
    "test_stop": "a",
    "test_simulation": "h",
}
"""Which promise a module shows, by words of its path."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `point` is the letter of the promise."""

    point: str
    what: str
    result: str
    seconds: float


@dataclass(eq=False)
class Collector:
    """A pytest plugin: the rows that tests report, the tests that fail, and counts of the others."""

    rows: list[Row] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = report.nodeid.split("::")[0].removeprefix("tests/")
        reported: list[Any] = [value for key, value in report.user_properties if key == "row"]
        if report.when == "call":
            # what was measured is told also where it was not good enough
            self.rows += [Row(*row) for row in reported]
        if report.failed:
            name = report.nodeid.removeprefix("tests/")
            self.rows.append(Row(point_of(module), name, f"FAILED ({report.when})", report.duration))
        elif report.when == "call" and report.passed and not reported:
            self.counts[module] += 1
            self.seconds[module] = self.seconds.get(module, 0.0) + report.duration

    def table(self) -> list[Row]:
        """All rows in the order of the promises."""
        counted = [
            Row(point_of(module), module, f"{count} passed", self.seconds[module])
            for module, count in self.counts.items()
        ]
        return sorted([*self.rows, *counted], key=lambda row: row.point)


def point_of(module: str) -> str:
    return next((point for words, point in POINTS.items() if words in module), "?")


def show(rows: list[Row], console: Console) -> None:
    table = Table("point", "what", "result", "seconds", title="Acceptance")
    for row in rows:
        table.add_row(row.point, row.what, row.result, f"{row.seconds:.1f}")
    console.print(table)


def as_markdown(rows: list[Row]) -> str:
    lines = ["| point | what | result | seconds |", "| --- | --- | --- | ---: |"]
    lines += [f"| {row.point} | {row.what} | {row.result} | {row.seconds:.1f} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    parser.add_argument("-k", dest="only", default="", help="only tests that match (as pytest -k)")
    options = parser.parse_args()
    collector = Collector()
    arguments = [str(ROOT / "tests" / "accept"), str(ROOT / "tests" / "e2e")]
    arguments += ["--timeout=1200", "-q", "-p", "no:cacheprovider"]
    if options.only:
        arguments += ["-k", options.only]
    start = time.monotonic()
    status = int(pytest.main(arguments, plugins=[collector]))
    minutes = (time.monotonic() - start) / 60
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = collector.table()
    show(rows, console)
    console.print(f"{minutes:.1f} minutes, exit status {status}")
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
