"""Rows of the GPU's table: what is wrong is told, and the exit status with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.cases import BEST, COPY, KernelCase, Rate, measure
from benchmarks.gpu.needs import ENGINE, Need, missing
from benchmarks.gpu.report_table import compact
from benchmarks.gpu.rows import Row, RowFile, line, read_rows
from benchmarks.gpu.summary import summary
from benchmarks.gpu.timing import Timer


class FixedTimer(Timer):
    """Says that a call takes what it returns, and that a copy moves 100 GB/s."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def seconds(self, call: object, *, is_cold: bool = True) -> float:
        assert callable(call)
        return float(call())

    def copy_bandwidth(self, num_bytes: int) -> float:
        return 100e9


def cannot() -> float:
    raise RuntimeError("no kernel for this shape")


def case(**changes: object) -> KernelCase:
    fields: dict[str, object] = {
        "kernel": "k",
        "shape": "s",
        "work": 1e12,
        "rate": Rate.FLOPS,
        "ours": lambda: 0.5,
        "error": lambda: 0.0,
        **changes,
    }
    return KernelCase(**fields)  # type: ignore[arg-type]


def test_the_best_rival_is_the_one_compared_with_and_the_others_are_named() -> None:
    rivals = {"slow": lambda: 2.0, "fast": lambda: 0.25, "absent": cannot}
    row = measure(case(rivals=rivals, bars={BEST: 0.75, "slow": 1.0}), FixedTimer(), math.nan)
    assert (row.value, row.against, row.against_value, row.ratio) == (2.0, "fast", 4.0, 0.5)
    assert row.verdict == "fail", "one of two bars is missed"
    assert "absent cannot" in row.note
    assert measure(case(rivals=rivals, bars={"slow": 1.0}), FixedTimer(), math.nan).verdict == "pass"


def test_a_bar_against_a_copy_is_that_of_the_faster_of_the_small_and_the_large_copy() -> None:
    shape = case(work=80e9, rate=Rate.BYTES, ours=lambda: 1.0, has_copy=True)
    assert measure(shape, FixedTimer(), 200e9).ratio == pytest.approx(0.8)
    barred = case(work=80e9, rate=Rate.BYTES, ours=lambda: 1.0, has_copy=True, bars={COPY: 0.7})
    assert measure(barred, FixedTimer(), 200e9).verdict == "fail"
    assert measure(barred, FixedTimer(), 50e9).verdict == "pass"


@pytest.mark.parametrize("error", [0.02, math.inf, math.nan])
def test_a_case_that_differs_from_its_twin_is_wrong(error: float) -> None:
    row = measure(case(error=lambda: error, rivals={"r": lambda: 1.0}), FixedTimer(), math.nan)
    assert not row.is_right
    assert "**no**" in line(row)


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    rows = [Row("a", "b", 1.0, "GB/s", "c", 2.0), Row("a", "d", 3.0, "GB/s", is_right=False)]
    file = RowFile(tmp_path / "rows.jsonl")
    for row in rows:
        file.add(row)
    assert [line(row) for row in read_rows(tmp_path / "rows.jsonl")] == [line(row) for row in rows]
    assert not file.is_right


def test_what_breaks_off_is_a_wrong_row_and_the_rest_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[Row]:
        yield Row("a", "b", 1.0, "GB/s")
        raise RuntimeError("out of | memory")

    file = RowFile(None)
    file.add_all("a", rows)
    file.add_all("c", lambda: [Row("c", "d", 1.0, "GB/s")])
    assert [row.is_right for row in file.rows] == [True, False, True]
    assert file.rows[1].note == "RuntimeError: out of / memory"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "is_right", "expected"),
    [
        ({"correctness": 0, "kernels": 0}, True, 0),
        ({"correctness": 1, "kernels": 0}, True, 1),
        ({"correctness": 0, "kernels": 0}, False, 1),
        ({"correctness": 0, "kernels": 124}, True, 3),
        ({"correctness": 124, "kernels": 0}, True, 1),
    ],
)
def test_the_exit_status_tells_wrong_results_from_steps_that_broke_off(
    tmp_path: Path, statuses: dict[str, int], is_right: bool, expected: int
) -> None:
    RowFile(tmp_path / "kernels.jsonl").add(Row("a", "b", 1.0, "GB/s", verdict="fail", is_right=is_right))
    text, status = summary(tmp_path, statuses)
    assert status == expected
    assert "1 missed" in text
    assert ("ran out of time" in text) == (124 in statuses.values())


def test_a_module_that_is_not_here_is_named_with_what_it_is_for() -> None:
    absent = Need("no_such_module.part", "no-such-package", "a test")
    assert missing((ENGINE[0], absent)) == ["no-such-package (for a test)"]


def test_the_report_has_a_line_for_each_kernel_with_spills_in_bold() -> None:
    row = {"name": "k", "registers": 40, "spilled_bytes": 0, "shared_bytes": 2048, "resident_warps": 16}
    hopper = {**row, "arch": 90, "instructions": ["wgmma.mma_async"], "spilled_bytes": 8}
    ampere = {**row, "arch": 80, "instructions": ["mma.sync"]}
    lines = compact([ampere, hopper, {**ampere, "name": "other"}]).splitlines()
    assert lines[0] == "| kernel | sm_80 | sm_90 |"
    assert lines[2] == "| k | 40 / 0 / 2 / 25% mma | 40 / **8** / 2 / 25% wgmma |"
    assert lines[3] == "| other | 40 / 0 / 2 / 25% mma | – |"
