"""Kernels compile for GPUs that are not here, without spilling, and attention reaches the tensor cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "benchmarks" / "kernel_report.py"


def report(*arguments: str, file: Path) -> tuple[int, Sequence[Mapping[str, Any]], str]:
    """In a process of its own: here, kernels are loaded for the interpreter."""
    command = [sys.executable, str(_SCRIPT), *arguments, "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Mapping[str, Any]]:
    code, rows, table = report("--samples", file=tmp_path_factory.mktemp("report") / "rows.json")
    assert code == 0, table
    return rows


@pytest.mark.timeout(300)
def test_the_samples_compile_for_three_architectures_without_a_spill(
    samples: Sequence[Mapping[str, Any]],
) -> None:
    assert {row["arch"] for row in samples} == {80, 90, 100}
    for row in samples:
        assert row["spilled_bytes"] == 0, row
        assert row["fault"] == "", row
        assert 0 < row["registers"] <= 255, row
        assert row["resident_warps"] >= row["num_warps"], row  # it fits a multiprocessor


@pytest.mark.timeout(300)
def test_attention_uses_each_architectures_tensor_cores(samples: Sequence[Mapping[str, Any]]) -> None:
    products = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    found = [row for row in samples if row["name"].startswith("prefill_attention")]
    assert {row["arch"] for row in found} == set(products)
    for row in found:
        assert products[row["arch"]] in row["instructions"], row
        copy = "cp.async.bulk.tensor" if "blocks of 128" in row["name"] else "cp.async.cg"
        assert copy in row["instructions"], row


def test_every_module_with_a_kernel_describes_what_it_launches() -> None:
    for path in sorted((_ROOT / "engine" / "kernels").glob("*.py")):
        text = path.read_text()
        if re.search(r"^@kernel\(", text, re.MULTILINE):
            assert re.search(r"^def builds\(arch: int\)", text, re.MULTILINE), path.name


@pytest.mark.timeout(120)
def test_a_build_that_spills_or_misses_an_instruction_is_a_fault(tmp_path: Path) -> None:
    probe = """
import sys
from dataclasses import replace
from benchmarks import kernel_report
from engine.kernels import prefill_attention as module

build = next(b for b in module.builds(90) if b.is_sample)
tight = replace(build, options={**build.options, "maxnreg": 96})
row = kernel_report.compile_build(tight, 90)
assert row.spilled_bytes > 0 and "spills" in row.fault, row
row = kernel_report.compile_build(replace(tight, may_spill=True), 90)
assert row.fault == "", row
small = replace(build, constexprs={**build.constexprs, "BLOCK_M": 32})
row = kernel_report.compile_build(small, 90)
assert row.fault == "does not use wgmma", row
"""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
