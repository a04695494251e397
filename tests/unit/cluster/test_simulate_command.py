"""`baton simulate` from the command line: a report that reads back, and faults that are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from cluster.loadtest.report import from_json
from cluster.simulator.profile import Profile, write_profile
from core.errors import InvalidConfig
from tests.unit.cluster.simulator.world import SMALL

NUM_REQUESTS = 30


def simulate(folder: Path, *arguments: str) -> Result:
    profile = Profile(SMALL.layout, SMALL.num_blocks, SMALL.max_context, SMALL.price, SMALL.link)
    write_profile(profile, folder / "profile.json")
    lines = [
        {"timestamp": 250 * i, "input_length": 300 + 20 * i, "output_length": 5 + i}
        for i in range(NUM_REQUESTS)
    ]
    too_long = {"timestamp": 0, "input_length": SMALL.max_context, "output_length": 1}
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, too_long)))
    files = ["--profile", str(folder / "profile.json"), "--trace", str(folder / "trace.jsonl")]
    return CliRunner().invoke(app, ["simulate", *files, "--out", str(folder / "new" / "out"), *arguments])


def test_the_report_is_a_load_tests_and_the_exit_status_its_verdict(tmp_path: Path) -> None:
    result = simulate(tmp_path, "--slo-ttft", "5", "--slo-itl", "0.5")
    assert result.exit_code == 0, result.output
    report = from_json((tmp_path / "new" / "out" / "report.json").read_bytes())
    summary = report.steps[0].summary
    assert (summary.num_completed, summary.num_short, summary.num_errors) == (NUM_REQUESTS, 0, 0)
    assert summary.num_output_tokens == sum(5 + i for i in range(NUM_REQUESTS))
    assert report.verdict.headline in result.output
    assert f"{NUM_REQUESTS} requests, 1 left out as longer than {SMALL.max_context} tokens" in result.output
    assert "<html" in (tmp_path / "new" / "out" / "report.html").read_text()
    assert simulate(tmp_path, "--slo-ttft", "0.001").exit_code == 1


def test_settings_reach_the_simulated_workers(tmp_path: Path) -> None:
    together = simulate(tmp_path, "--prefill-replicas", "0", "--decode.max_num_seqs=3")
    assert together.exit_code == 0, together.output
    report = from_json((tmp_path / "new" / "out" / "report.json").read_bytes())
    assert ("decode.max_num_seqs", "3") in report.configuration
    assert [name for name, _ in report.machine] == ["decode-000"]


def test_the_autoscalers_decisions_are_a_log_that_replays(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    limits = ("--autoscaling.max_decode_workers=2", "--autoscaling.startup_s=1")
    result = simulate(tmp_path, "--autoscale", f"--autoscaling.log_file={log}", *limits)
    assert result.exit_code == 0, result.output
    assert "autoscaler: prefill 1 to 1, in the end 1; decode 1 to" in result.output
    replayed = CliRunner().invoke(app, ["decisions", "replay", str(log)])
    assert replayed.exit_code == 0, replayed.output
    assert "none of them otherwise" in replayed.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--speed", "0"), "speed"),
        (("--autoscale", "--autoscaling.min_decode_workers=0"), "min_decode_workers"),
        (("--speed=-1",), "speed"),
        (("--spread=-1",), "spread"),
        (("--attainment", "7"), "attainment"),
        (("--warm-up", "1e6"), "warm-up"),
        (("--decode-replicas", "0"), "num_decode"),
        (("--decode.nonsense=1",), "nonsense"),
        (("--profile", "nowhere.json"), "nowhere.json"),
        (("--out", "profile.json/out"), "--out"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = simulate(tmp_path, *arguments)
    assert isinstance(result.exception, InvalidConfig)
    assert named in result.exception.message
