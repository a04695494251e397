"""`baton loadtest` against the real model: its numbers are the socket's and the server's (case 56)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import median

import pytest

from cluster.loadtest.report import LoadReport, from_json
from core import telemetry
from tests.e2e import profiles
from tests.e2e.eavesdropper import Eavesdropper, Overheard
from tests.e2e.fleet import Fleet
from tests.e2e.harness import BATON, System
from tests.e2e.ray_head import RayHead, start_ray_head
from tests.e2e.scrape import Scrape, rise, scrape, wait_idle

SHORT = ("--rate", "3", "--requests", "10", "--isl", "40:80", "--osl", "6:10", "--slo-ttft", "60")


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.STD)


def loadtest(*arguments: str, timeout_s: float = 120.0) -> tuple[int, str]:
    """Exit status and what was printed."""
    done = subprocess.run(
        [BATON, "loadtest", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout + done.stderr


def report_in(folder: Path) -> LoadReport:
    """Read strictly: an unknown, missing or wrong field is an error."""
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    return from_json((folder / "report.json").read_bytes())


def count(before: Scrape, after: Scrape, name: str) -> float:
    return rise(before, after, f"{name}_count")


def test_a_short_run_gives_a_report_whose_counts_are_the_servers(system: System, tmp_path: Path) -> None:
    wait_idle(system.client)
    url = f"http://127.0.0.1:{system.port}"
    status, text = loadtest("--url", url, *SHORT, "--out", str(tmp_path))
    assert status == 0, text
    report = report_in(tmp_path)
    summary = report.steps[0].summary
    assert (summary.num_completed, summary.num_errors, summary.num_refused) == (10, 0, 0)
    assert (summary.num_wrong_prompts, summary.num_short, summary.num_uncounted) == (0, 0, 0)
    assert report.verdict.headline in text.replace("\n", " ")
    # the same seed again is the same workload; the server has then counted one first token for each request
    before = scrape(system.client)
    assert loadtest("--url", url, *SHORT, "--out", str(tmp_path))[0] == 0
    wait_idle(system.client)
    again, after = report_in(tmp_path), scrape(system.client)
    lengths = [(row.due_s, row.num_prompt_tokens, row.num_output_tokens) for row in report.detail.rows]
    assert lengths == [(row.due_s, row.num_prompt_tokens, row.num_output_tokens) for row in again.detail.rows]
    num_asked = count(before, after, telemetry.TTFT_SECONDS)
    num_before = num_asked - 10
    assert 3 <= num_before < 40, "words of one token are found by a few requests of one token"
    assert sum(row.num_cached_tokens for row in again.detail.rows) > 0, (
        "the second run meets its own prefixes"
    )


def test_latencies_are_those_of_the_socket(system: System, tmp_path: Path) -> None:
    """Chat with prompts long enough to be seen, the piece that only names the role coming before."""
    with Eavesdropper(system.port).running() as ear:
        status, text = loadtest(
            *("--url", f"http://127.0.0.1:{ear.port}", "--api", "chat", "--arrivals", "closed"),
            *("--requests", "8", "--isl", "400", "--osl", "12", "--seed", "56", "--out", str(tmp_path)),
        )
        assert status == 0, text
        heard: list[Overheard] = ear.heard[-8:]
    rows = report_in(tmp_path).detail.rows
    assert len(rows) == len(heard) == 8
    late, ends = [], []
    for row, one in zip(rows, heard, strict=True):
        assert row.ttft_s is not None
        assert one.ttft_s is not None
        assert one.e2e_s is not None
        assert row.ttft_s > one.ttft_s, "the client cannot see a token before the socket has it"
        late.append(row.ttft_s - one.ttft_s)
        ends.append(row.e2e_s - one.e2e_s)
        assert row.tpot_s is not None
        # first token and the rest are the whole, but for the events after the last token
        assert row.ttft_s + row.tpot_s * (row.num_output_tokens - 1) <= row.e2e_s + 1e-3
    # connecting and both processes' turns lie between; other work of the machine may delay some
    assert median(late) < 0.02
    assert median(ends) < 0.03


def test_the_exit_status_is_the_verdict(system: System, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{system.port}"
    status, text = loadtest("--url", url, *SHORT, "--slo-ttft", "0.0001", "--out", str(tmp_path))
    assert status == 1, text
    assert not report_in(tmp_path).verdict.has_passed
    status, text = loadtest("--url", "http://127.0.0.1:9", *SHORT, "--out", str(tmp_path / "none"))
    assert (status, "no result" in text) == (3, True)
    assert not (tmp_path / "none" / "report.json").exists()
    status, text = loadtest("--url", url, "--rate", "0", "--out", str(tmp_path))
    assert (status, "rate" in text) == (2, True), text


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> RayHead:
    with start_ray_head() as head:
        yield head  # type: ignore[misc]


def test_as_a_ray_job_its_log_and_its_report_come_back(
    system: System, ray_head: RayHead, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:4{i}.5,{50 + i},4" for i in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    out = tmp_path / "out"
    status, text = loadtest(
        *("--submit", ray_head.url, "--url", f"http://127.0.0.1:{system.port}"),
        *("--trace", str(trace), "--speed", "2", "--slo-ttft", "60", "--out", str(out)),
    )
    assert status == 0, text
    assert "words of one token each" in text, "the job's log is shown"
    assert "#baton-report" not in text
    report = report_in(out)
    assert [row.num_prompt_tokens for row in report.detail.rows] == [50 + i for i in range(6)]
    assert ("workload.trace", "trace.csv") in report.configuration
    status, text = loadtest(
        "--submit", ray_head.url, "--url", "http://127.0.0.1:9", *SHORT, "--out", str(out)
    )
    assert status == 3
    assert "ended without a report (failed)" in text
    assert "no result" in text
