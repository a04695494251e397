"""Acceptance: the full grids of what must be shown, and one table of their results.

Runs `tests/accept`, the cases with their slow parts, the bridge's faults and the kills on Ray, collects the
rows that they report and prints them, also as Markdown for docs/benchmarks.md with `--markdown FILE`. Tests
that report nothing are counted by file. Exit status: that of the tests.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1] / "tests"
_ON_RAY = ("test_on_ray.py", "test_bridge_faults.py", "test_kill.py")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `point` is the letter of the promise."""

    point: str
    what: str
    result: str
    seconds: float


@dataclass(eq=False, slots=True)  # pytest keeps its plugins in a set
class Collector:
    """A pytest plugin: reported rows, one for each failed test, one for all others of a file."""

    reported: list[Row] = field(default_factory=list)
    passed: dict[str, list[float]] = field(default_factory=dict)  # seconds, by file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix("tests/")
        if report.failed:
            self.reported.append(Row(_point(report.nodeid), name, f"FAILED ({report.when})", report.duration))
        elif report.when == "call" and report.passed:
            rows: list[Any] = [value for key, value in report.user_properties if key == "row"]
            self.reported += [Row(*row) for row in rows]
            if not rows:
                self.passed.setdefault(name.partition("::")[0], []).append(report.duration)

    @property
    def rows(self) -> list[Row]:
        counted = [
            Row(_point(name), name, f"{len(seconds)} passed", sum(seconds))
            for name, seconds in self.passed.items()
        ]
        return sorted([*self.reported, *counted], key=lambda row: row.point)


_POINTS = {"/cases/": "f", "test_on_ray": "d", "test_bridge_faults": "d", "test_kill": "g"}


def _point(node: str) -> str:
    return next((point for part, point in _POINTS.items() if part in node), "?")


def show(rows: list[Row], console: Console) -> None:
    table = Table("point", "what", "result", "seconds", title="Acceptance")
    for row in rows:
        table.add_row(row.point, row.what, row.result, f"{row.seconds:.1f}")
    console.print(table)


def as_markdown(rows: list[Row]) -> str:
    lines = ["| point | what | result | seconds |", "| --- | --- | --- | ---: |"]
    for row in rows:
        lines.append(f"| {row.point} | {row.what} | {row.result} | {row.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    parser.add_argument("-k", dest="only", default="", help="only tests that match (as pytest -k)")
    options = parser.parse_args()
    collector = Collector()
    arguments = [
        *(
            str(TESTS / "accept"),
            str(TESTS / "e2e" / "cases"),
            *(str(TESTS / "e2e" / name) for name in _ON_RAY),
        ),
        # all of a case's parts, the slow ones too: the option overrides the one for every change
        *("-m", "slow or not slow", "--timeout=1200", "-v", "-p", "no:cacheprovider"),
    ]
    if options.only:
        arguments += ["-k", options.only]
    start = time.monotonic()
    status = int(pytest.main(arguments, plugins=[collector]))
    minutes = (time.monotonic() - start) / 60
    console = Console(width=160 if not sys.stdout.isatty() else None)
    show(collector.rows, console)
    console.print(f"{len(collector.rows)} rows, {minutes:.1f} minutes, exit status {status}")
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(collector.rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
