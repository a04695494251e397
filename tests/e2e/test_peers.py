"""The comparison with other servers runs as its command line says, on a toy model of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.e2e.fleet import Models
from tests.e2e.harness import BATON, ROOT

COMMAND = BATON + " serve --local --port ${PORT} --model ${TOY} --router.plan=remote"


def test_a_server_is_started_measured_and_stopped(models: Models, tmp_path: Path) -> None:
    servers = tmp_path / "servers.yaml"
    entry = {"name": "ours", "command": COMMAND, "ready": "/ready"}
    broken = {"name": "broken", "command": sys.executable + " -c 1"}
    servers.write_text(yaml.safe_dump({"servers": [entry, broken]}))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.peers", "--servers", str(servers), "--repeats", "1"),
            *("--workloads", "AD"),
            *("--tokenizer", str(models.bundled), "--logs", str(tmp_path), "--out", str(tmp_path / "runs")),
        ],
        cwd=ROOT,
        env={**os.environ, "TOY": str(models.toy())},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (tmp_path / "runs").exists(), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs").read_text().splitlines()]
    assert [row["workload"] for row in rows] == list("AD"), done.stderr
    assert all(row["plans"] == {"remote": 1.0} for row in rows), rows
    assert all(row["tokens_per_s"] > 0 and row["ttft_p50"] > 0 and row["longest_gap"] > 0 for row in rows)
    assert "| D | ours |" in done.stdout
    assert done.returncode == 1, "a server that does not start is a failure"
    assert "StartFailed: broken ended with status 0" in done.stdout
