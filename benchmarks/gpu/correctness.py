"""The kernels against their twins: the test suite where there is pytest, a grid of the same cases elsewhere.

python -m benchmarks.gpu.correctness [--rows FILE] [--toy]

Exits with 1 when anything differs. `--toy` is a small grid.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.gpu import needs
from benchmarks.gpu.rows import HEADER, Row, RowFile
from benchmarks.gpu.timing import device_here

_ROOT = Path(__file__).resolve().parents[2]
_MAX_PROCESSES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if device_here().type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    file = RowFile(options.rows)
    if options.toy or needs.missing(needs.KERNEL_TESTS):
        from benchmarks.gpu import twin_grid  # late: the interpreter is chosen before

        print(HEADER)
        twin_grid.add_rows(file, device_here(), is_toy=options.toy)
    else:
        file.add(_tested())
    return 0 if file.is_right else 1


def _tested() -> Row:
    """All of tests/kernels, on the GPU if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-c", "benchmarks/gpu/pytest.ini", "--rootdir=."]
        command += [f"--junitxml={report}", "tests/kernels"]
        if needs.FASTER_TESTS[0].is_here:
            command += ["-n", str(min(_MAX_PROCESSES, os.cpu_count() or 1))]
        if needs.FASTER_TESTS[1].is_here:
            command += ["--timeout=60"]
        status = subprocess.run(command, cwd=_ROOT, check=False).returncode
        suite = ET.parse(report).find("testsuite") if report.exists() else None
    counts = {"tests": 0, "failures": 0, "errors": 0}
    if suite is not None:
        counts = {name: int(suite.get(name, 0)) for name in counts}
    num_bad = counts["failures"] + counts["errors"]
    note = f"{num_bad} failed, exit status {status}" if status else ""
    return Row(
        "kernels equal their twins",
        "tests/kernels",
        counts["tests"],
        "tests",
        is_right=status == 0 and counts["tests"] > 0,
        note=note,
    )


if __name__ == "__main__":
    sys.exit(main())
