"""The library is built once, never seen half made, and its absence is a clear answer."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from core.errors import InvalidConfig
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.native import build
from engine.native.build import NativeUnavailable, build_library
from engine.native.operators import ISA_VARIABLE, load_ops
from tests.oracle import make_toy_checkpoint, oracle_logits
from tests.unit.engine.test_attention import Paged


def make_compiler(folder: Path, script: str) -> Path:
    """A program that stands where the compiler would, and counts its calls beside itself."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo 1.0; exit 0; fi\n{script}\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return compiler


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "toy")


def test_several_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = 'for target; do :; done\necho built >> "$0.calls"\necho whole > "$target"'
    compiler = make_compiler(tmp_path, last)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build_library(tmp_path / "kept"), range(4)))
    (path,) = paths
    assert path.read_text() == "whole\n"
    assert Path(f"{compiler}.calls").read_text() == "built\n"
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", path.name]


def test_a_failing_compiler_is_reported_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler(tmp_path, "echo no such option >&2; exit 1")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match="no such option"):
        build_library(tmp_path / "kept")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(NativeUnavailable, match="absent"):
        build_library(tmp_path)


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(NativeUnavailable, match="riscv64"):
        build_library()


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse")
    with pytest.raises(NativeUnavailable, match="avx2 or avx512"):
        load_ops()


@pytest.mark.usefixtures("without_compiler")
def test_auto_falls_back_to_torch_and_says_why(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load_model(EngineConfig(model=str(toy), cpu_kernels="auto"))
    assert loaded.ops is None
    assert "no C++ compiler" in caplog.text


@pytest.mark.usefixtures("without_compiler")
def test_native_without_a_compiler_is_refused_at_start(toy: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no C\+\+ compiler"):
        load_model(EngineConfig(model=str(toy), cpu_kernels="native"))


def test_a_head_size_that_is_no_multiple_of_16_runs_on_torch(tmp_path: Path) -> None:
    folder = make_toy_checkpoint(tmp_path, head_dim=24)
    assert load_model(EngineConfig(model=str(folder), cpu_kernels="auto")).ops is None
    with pytest.raises(InvalidConfig, match="24"):
        load_model(EngineConfig(model=str(folder), cpu_kernels="native"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_16_bit_checkpoint_stays_16_bit_and_gives_the_reference_logits(
    tmp_path: Path, isa: str, arch: str, dtype: torch.dtype
) -> None:
    try:
        load_ops()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    folder = make_toy_checkpoint(tmp_path, arch, dtype=dtype)
    paged = Paged(folder, "native")
    sequence = paged.sequence(100)
    (logits,) = paged.run([sequence], lambda: 33)
    assert (logits - oracle_logits(folder, sequence.token_ids)).abs().max() < 1e-4
    assert os.environ[ISA_VARIABLE] == isa
