"""Row: one line of the table, and the file that a step leaves it in.

Owns the columns and their text. A step appends each row as it is measured, so that one which runs out of
time leaves what it has. Any thread of one process.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """`value` of `unit` beside `against_value` of the same unit; NaN where nothing was measured.

    `bar` says what `ratio` must be, `verdict` whether it is: `pass`, `fail`, or empty without a bar or a
    measurement. `is_right` is the answer of the comparison with the twin or the sender.
    """

    what: str
    case: str
    value: float
    unit: str
    against: str = ""
    against_value: float = math.nan
    bar: str = ""
    verdict: str = ""
    is_right: bool = True
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.value / self.against_value if self.against_value else math.nan


class RowFile:
    """Rows of one step, printed as they come and kept in `path`, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    @property
    def is_right(self) -> bool:
        return all(row.is_right for row in self.rows)

    def add_all(self, what: str, rows: Callable[[], Iterable[Row]]) -> None:
        """Add what `rows` makes; if it breaks off, a row that says so, and others are still measured."""
        try:
            for row in rows():
                self.add(row)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is in the table, and counts as wrong
            traceback.print_exc()
            note = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:200]
            self.add(Row(what, "broke off", math.nan, "", is_right=False, note=note))


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def verdict(ratio: float, least: float) -> str:
    if math.isnan(ratio):
        return ""
    return "pass" if ratio >= least else "fail"


HEADER = (
    "| what | case | measured | against | its value | ratio | bar | verdict | right | note |\n"
    "| --- | --- | ---: | --- | ---: | ---: | --- | --- | --- | --- |"
)


def line(row: Row) -> str:
    cells = (
        row.what,
        row.case,
        number(row.value, row.unit),
        row.against,
        number(row.against_value, row.unit),
        "" if math.isnan(row.ratio) else f"{row.ratio:.2f}",
        row.bar,
        row.verdict,
        "yes" if row.is_right else "**no**",
        row.note,
    )
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[Row]) -> str:
    return "\n".join([HEADER, *map(line, rows)])


_COUNTS = ("cases", "tests")


def number(value: float, unit: str) -> str:
    if math.isnan(value):
        return "–"
    if 0 < abs(value) < 1e-2:
        return f"{value:.1e} {unit}".strip()
    digits = 0 if abs(value) >= 1000 or unit in _COUNTS else 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f} {unit}".strip()
