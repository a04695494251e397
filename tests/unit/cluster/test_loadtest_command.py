"""The command line becomes settings, and what makes no sense is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster import loadtest_command
from cluster.cli import app
from cluster.loadtest.settings import ArrivalKind, LoadTestSettings, Range, WorkloadKind
from cluster.loadtest_command import Job
from cluster.loadtest_submit import entrypoint, pack
from core.config import from_mapping
from core.errors import InvalidConfig

Asked = tuple[LoadTestSettings, Path, Job | None]


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Asked:
    """What would be run."""
    seen: list[Asked] = []

    def run(settings: LoadTestSettings, out: Path, job: Job | None, console: Console) -> int:
        seen.append((settings, out, job))
        return 0

    monkeypatch.setattr(loadtest_command, "run", run)
    result = CliRunner().invoke(app, ["loadtest", *arguments])
    if result.exception is not None:
        raise result.exception
    return seen[0]


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, out, job = asked(
        monkeypatch,
        *("--rate", "3", "--arrivals", "gamma", "--cv", "4", "--isl", "64:512", "--osl", "16"),
        *("--slo-ttft", "0.5", "--slo-itl", "0.05", "--out", "there"),
    )
    assert (settings.arrivals.kind, settings.arrivals.rate, settings.arrivals.cv) == (ArrivalKind.GAMMA, 3, 4)
    assert (settings.workload.prompt, settings.workload.output) == (Range(64, 512), Range(16, 16))
    assert (settings.slo.ttft_s, settings.slo.itl_s, settings.slo.attainment) == (0.5, 0.05, 0.9)
    assert (settings.search, out, job) == (None, Path("there"), None)


def test_a_trace_brings_its_own_times_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _, _ = asked(monkeypatch, "--trace", "t.csv")
    assert settings.workload.kind is WorkloadKind.TRACE
    assert settings.arrivals.kind is ArrivalKind.TRACE
    settings, _, _ = asked(monkeypatch, "--trace", "t.csv", "--arrivals", "poisson", "--rate", "2")
    assert settings.arrivals.kind is ArrivalKind.POISSON


def test_a_search_begins_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _, job = asked(
        monkeypatch, "--search", "--rate", "2", "--slo-ttft", "1", "--submit", "http://127.0.0.1:8265"
    )
    assert settings.search is not None
    assert settings.search.start == 2
    assert job == Job("http://127.0.0.1:8265")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "rate"),
        (("--rate", "0"), "rate"),
        (("--isl", "many", "--rate", "1"), "isl"),
        (("--isl", "9:3", "--rate", "1"), "9:3"),
        (("--search",), "search"),
        (("--url", "here", "--rate", "1"), "url"),
        (("--workload", "trace"), "trace"),
    ],
)
def test_the_fault_is_named(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        asked(monkeypatch, *arguments)


def test_a_job_s_folder_holds_all_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace, folder = tmp_path / "t.csv", tmp_path / "job"
    trace.write_text("a trace")
    folder.mkdir()
    settings, _, _ = asked(monkeypatch, "--trace", str(trace), "--seed", "7")
    pack(settings, folder)
    assert (folder / "t.csv").read_text() == "a trace"
    found = from_mapping(LoadTestSettings, json.loads((folder / "settings.json").read_text()))
    assert found.workload.trace == Path("t.csv")
    assert found.seed == 7
    with pytest.raises(InvalidConfig, match="absent"):
        pack(asked(monkeypatch, "--trace", str(tmp_path / "absent.csv"))[0], folder)


@pytest.mark.parametrize("is_there", [True, False], ids=["this machine", "a tunnel"])
def test_a_job_runs_on_the_interpreter_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    """`ray dashboard` makes another machine's port one of this machine."""
    for name in ("here", "python"):
        found = tmp_path / name
        found.write_text(f"#!/bin/sh\necho {name} $*\n")
        found.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ("here" if is_there else "nowhere")))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    commands = [entrypoint("http://127.0.0.1:8265", None), entrypoint("http://head:8265", None)]
    told = [
        subprocess.run(command, shell=True, capture_output=True, text=True).stdout for command in commands
    ]
    job = "-m cluster.loadtest_job settings.json\n"
    assert told == [f"{'here' if is_there else 'python'} {job}", f"python {job}"]
    assert entrypoint("http://127.0.0.1:8265", "/opt/py thon").startswith("'/opt/py thon' -m ")
