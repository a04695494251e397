"""The rows of `benchmarks/kernel_report.py --json FILE` as a table with one line for each kernel.

python -m benchmarks.gpu.report_table FILE

A cell is registers per thread / spilled bytes / KiB of shared memory / predicted occupancy, and how the
tensor cores are reached.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WARPS = 64  # of a multiprocessor
_TENSOR_CORES = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}


def compact(rows: Sequence[dict[str, Any]]) -> str:
    """`rows` as `kernel_report` writes them, in the order of their first appearance."""
    architectures = sorted({row["arch"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        cells.setdefault(row["name"], {})[row["arch"]] = _cell(row)
    lines = [
        "| kernel | " + " | ".join(f"sm_{arch}" for arch in architectures) + " |",
        "| --- |" + " --- |" * len(architectures),
    ]
    for name, found in cells.items():
        lines.append(f"| {name} | " + " | ".join(found.get(arch, "–") for arch in architectures) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    numbers = [
        str(row["registers"]),
        f"**{row['spilled_bytes']}**" if row["spilled_bytes"] else "0",
        f"{row['shared_bytes'] / 1024:.0f}",
        f"{row['resident_warps'] / _WARPS:.0%}",
    ]
    cores = [_TENSOR_CORES[name] for name in row["instructions"] if name in _TENSOR_CORES]
    return " ".join([" / ".join(numbers), *cores[:1]])


if __name__ == "__main__":
    print(compact(json.loads(Path(sys.argv[1]).read_text())))
