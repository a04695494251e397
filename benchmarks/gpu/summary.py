"""The table of all steps, and the exit status of the whole run.

python -m benchmarks.gpu.summary FOLDER STEP=STATUS...

Each step has left FOLDER/STEP.jsonl. Exits with 1 if anything was wrong or the correctness step did not end
well, with 3 if another step broke off or ran out of time; missed bars are shown and change nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.rows import Row, read_rows, table

CORRECTNESS = "correctness"
_TIMED_OUT = (124, 137)


def summary(folder: Path, statuses: Mapping[str, int]) -> tuple[str, int]:
    """The text and the exit status."""
    rows: dict[str, list[Row]] = {name: read_rows(folder / f"{name}.jsonl") for name in statuses}
    everything = [row for found in rows.values() for row in found]
    lines = [table(everything), ""]
    for name, status in statuses.items():
        if status:
            how = "ran out of time" if status in _TIMED_OUT else f"ended with status {status}"
            lines.append(f"step {name} {how} after {len(rows[name])} rows")
    num_wrong = sum(not row.is_right for row in everything)
    passed, failed = (sum(row.verdict == word for row in everything) for word in ("pass", "fail"))
    lines.append(f"{num_wrong} wrong; bars: {passed} passed, {failed} missed")
    if num_wrong or statuses.get(CORRECTNESS, 0):
        return "\n".join(lines), 1
    return "\n".join(lines), 3 if any(statuses.values()) else 0


def main(arguments: Sequence[str]) -> int:
    folder, *pairs = arguments
    statuses = {name: int(status) for name, _, status in (pair.partition("=") for pair in pairs)}
    text, status = summary(Path(folder), statuses)
    (Path(folder) / "table.md").write_text(text + "\n")
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
