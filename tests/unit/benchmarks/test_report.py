"""The table says what was measured, and nothing where nothing was."""

from __future__ import annotations

import pytest

from benchmarks.measures import Summary
from benchmarks.report import Results, configuration, machine, table
from benchmarks.servers import ServerSpec
from benchmarks.workloads import Workload


def results(name: str, rates: list[float], *, is_peer: bool = False, workloads: str = "AB") -> Results:
    found = Results(ServerSpec(name, f"{name} serve", is_peer=is_peer, weights="fp16", workloads=workloads))
    for rate in rates:
        found.add(Workload.A, Summary(rate, 2.0 / rate, None, 1.0 / rate, None, 4.0 / rate), {})
    return found


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Cells by workload and server."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {(row[0], row[1]): row for row in cells}


def test_a_row_holds_medians_their_spread_and_ratios_against_each_peer() -> None:
    found = rows(
        table(
            [
                results("peer", [10.0, 12.0, 8.0], is_peer=True),
                results("slow", [5.0], is_peer=True),
                results("ours", [20.0, 40.0, 30.0]),
            ],
            [Workload.A],
        )
    )
    ours = found["A", "ours"]
    assert ours[3:5] == ["3", "30.0 (20.0–40.0)"]
    assert ours[-2:] == ["3.00 · 0.33 · 0.33", "6.00 · 0.17 · 0.17"]
    assert found["A", "peer"][-2:] == ["–", "2.00 · 0.50 · 0.50"]


def test_one_failed_run_leaves_no_result() -> None:
    ours = results("ours", [20.0, 40.0])
    ours.failures[Workload.A] = ["BrokenStream: 12 tokens instead of 128"]
    peer = results("peer", [10.0], is_peer=True)
    text = table([peer, ours], [Workload.A])
    assert rows(text)["A", "ours"][3:5] == ["failed", "–"]
    assert "12 tokens instead of 128" in configuration([ours], {})


def test_no_ratio_is_taken_against_a_peer_that_failed() -> None:
    peer = results("peer", [10.0], is_peer=True)
    peer.failures[None] = ["StartFailed: peer ended with status 1"]
    assert rows(table([peer, results("ours", [20.0])], [Workload.A]))["A", "ours"][-1] == "–"


def test_plans_are_means_of_the_runs_shares() -> None:
    ours = results("ours", [])
    summary = Summary(1.0, 1.0, None, 1.0, 1.0, 1.0)
    ours.add(Workload.B, summary, {"remote": 1.0})
    ours.add(Workload.B, summary, {"remote": 0.5, "local": 0.5})
    assert "local 25%, remote 75%" in rows(table([ours], [Workload.B]))["B", "ours"]


def test_a_server_has_rows_of_its_own_workloads_only() -> None:
    found = rows(table([results("ours", [1.0], workloads="A")], [Workload.A, Workload.B]))
    assert list(found) == [("A", "ours")]


@pytest.mark.parametrize(
    "wanted", ["processor", "memory", "commit", "repeats", "ours serve --port ${PORT}", "OMP=2"]
)
def test_the_configuration_is_kept(wanted: str) -> None:
    ours = Results(ServerSpec("ours", "ours serve --port ${PORT}", environment=("OMP=2",)))
    assert wanted in configuration([ours], {**machine(), "repeats": 3})
