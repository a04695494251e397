"""Content is written down only of calls that went wrong, where that was asked for, redacted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import orjson
import pytest

from core.errors import InvalidConfig, StepFailed
from core.ids import Role
from router.capture_config import CaptureConfig
from tests.unit.router.api import serving
from tests.unit.router.scripted import ScriptedWorker

PROMPT = "Write to ann.other@example.org or +49 170 1234567 about sk-secret-0123456789abcdef and the oak."


def _workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


def _broken() -> tuple[ScriptedWorker, ScriptedWorker]:
    prefill, decode = _workers()
    prefill.on_prefill = decode.on_generate = lambda job: StepFailed("broken")
    return prefill, decode


def _records(directory: Path) -> list[Any]:
    return [orjson.loads(path.read_bytes()) for path in sorted(directory.glob("*.json"))]


def _open_directory(parent: Path) -> Path:
    """One that everybody can enter."""
    directory = parent / "open"
    directory.mkdir()
    directory.chmod(0o755)
    return directory


async def test_nothing_is_written_down_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with serving(*_broken()) as api:
        assert (await api.complete(prompt=PROMPT)).status_code == 500
    assert not any(os.scandir(tmp_path))


async def test_a_call_that_failed_is_kept_without_what_names_people_or_keys(tmp_path: Path) -> None:
    directory = tmp_path / "captures"
    async with serving(*_broken(), capture=CaptureConfig(directory)) as api:
        assert (await api.chat(PROMPT)).status_code == 500
    (record,) = _records(directory)
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (record["why"], record["reason"]) == ("failed", "step_failed")
    said = record["request"]["messages"][0]["content"]
    assert "the oak" in said
    assert said.count("[redacted]") == 3
    for secret in ("ann.other", "1234567", "secret"):
        assert secret not in path.read_text()
    assert record["explanation"]["request_id"] == path.stem


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_slow_answer_is_kept_with_its_text(tmp_path: Path, is_streamed: bool) -> None:
    capture = CaptureConfig(tmp_path / "captures", ttft_slo_s=0.0, max_chars=20)
    async with serving(*_workers(), capture=capture) as api:
        answer = await api.complete(prompt="the", max_tokens=50, seed=5)
        text = answer.json()["choices"][0]["text"]
        for path in (tmp_path / "captures").glob("*"):
            path.unlink()
        await api.complete(prompt="the", max_tokens=50, seed=5, stream=is_streamed)
    record = _records(tmp_path / "captures")[-1]
    assert record["why"] == "ttft"
    assert record["answers"] == [text[:20]]


async def test_calls_that_are_fast_enough_refused_or_not_drawn_are_not_kept(tmp_path: Path) -> None:
    fast = CaptureConfig(tmp_path / "fast", ttft_slo_s=60.0, e2e_slo_s=60.0)
    async with serving(*_workers(), capture=fast) as api:
        await api.complete(prompt="the")
        assert (await api.complete(prompt="the", max_tokens=100_000)).status_code == 400
    never = CaptureConfig(tmp_path / "never", sample_ratio=0.0)
    async with serving(*_broken(), capture=never) as api:
        await api.complete(prompt="the")
    assert not _records(tmp_path / "fast")
    assert not _records(tmp_path / "never")


async def test_a_full_directory_takes_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        capture = CaptureConfig(tmp_path / "captures", e2e_slo_s=0.0, max_files=3)
        async with serving(*_workers(), capture=capture) as api:
            for _ in range(2):
                assert (await api.complete(prompt="the")).status_code == 200
    assert len(_records(tmp_path / "captures")) == 3


async def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    directory = _open_directory(tmp_path)
    with pytest.raises(InvalidConfig, match="chmod 700"):
        async with serving(*_workers(), capture=CaptureConfig(directory)):
            pass
    with pytest.raises(ValueError, match="redact"):
        CaptureConfig(redact=("(",))
