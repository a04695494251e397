"""The script for a lent GPU runs where there is none, as far as it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_SCRIPT = _ROOT / "benchmarks/gpu/run.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.timeout(420)
def test_a_dry_run_decodes_prefills_hands_over_and_ends_well(tmp_path: Path) -> None:
    done = run("--dry-run", "--steps", "model handoff", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "table.md").read_text()
    steps = ("decode step computes what prefill does", "host gap of a step", "prefill")
    for what in (*steps, "grpc", "shm", "cuda_ipc"):
        assert f"| {what}" in text
    assert "0 wrong" in text
    assert "skipped" not in text


def test_without_a_gpu_or_the_engine_s_modules_it_stops_at_once_and_says_why(tmp_path: Path) -> None:
    if not Path("/dev/nvidia0").exists():
        done = run("--steps", "model", "--out", str(tmp_path))
        assert done.returncode == 2
        assert "no GPU" in done.stderr
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec python3 -S "$@"\n')  # -S: no installed packages
    bare.chmod(0o755)
    done = run("--dry-run", "--out", str(tmp_path), PYTHON=str(bare))
    assert done.returncode == 2
    assert "missing: torch (for the engine)" in done.stderr


@pytest.mark.parametrize("arguments", [("--steps", "nothing"), ("--what",)])
def test_unknown_words_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert run("--dry-run", "--out", str(tmp_path), *arguments).returncode == 2
