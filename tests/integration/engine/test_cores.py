"""Workers of one host share its cores, and one of them is a process that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import cores
from engine.cores import CoreShare
from engine.step_costs import StepWork


def threads_of(share: CoreShare) -> int:
    with share.step(StepWork(num_prefill_tokens=16, num_streams=0)) as num_threads:
        return num_threads


def test_a_worker_killed_in_the_middle_of_a_step_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_LOOK_PERIOD_NS", 0)
    folder = tmp_path / "c"
    code = (
        "import pathlib, sys, time\n"
        "from engine.cores import CoreShare\nfrom engine.step_costs import StepWork\n"
        "share = CoreShare(2, pathlib.Path(sys.argv[1]))\n"
        "with share.step(StepWork(1, 0)):\n    print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        share = CoreShare(2, folder)
        assert threads_of(share) == 1
    finally:
        child.kill()
        child.communicate()
    assert threads_of(share) == 2
    assert len(list(folder.iterdir())) == 1
