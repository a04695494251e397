"""What is made before any process starts, and that a machine without a compiler serves all the same."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import BatonConfig, config_from_settings
from cluster.model_folder import prepare_model
from cluster.steps import Steps
from core.errors import InvalidConfig
from tests.oracle import make_toy_checkpoint


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatonConfig:
    folder = make_toy_checkpoint(tmp_path / "toy", arch="llama")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    return config_from_settings({"engine": {"model": str(folder)}})


def test_without_a_compiler_the_start_says_so_and_goes_on(config: BatonConfig) -> None:
    out = io.StringIO()
    prepared = prepare_model(config, Steps(Console(file=out, width=200)))
    assert "not possible, torch's are used" in out.getvalue()
    assert prepared.decode_engine.model == config.decode_engine.model
    assert prepared.router.model_name == "toy"


def test_a_configuration_that_insists_is_refused_by_the_setting_s_name(config: BatonConfig) -> None:
    insisting = replace(config, decode_engine=replace(config.decode_engine, cpu_kernels="native"))
    with pytest.raises(InvalidConfig) as caught:
        prepare_model(insisting, Steps(Console(file=io.StringIO())))
    assert caught.value.details["key"] == "engine.cpu_kernels"


def test_who_wants_torch_s_operators_builds_none(config: BatonConfig) -> None:
    wanting = replace(
        config,
        prefill_engine=replace(config.prefill_engine, cpu_kernels="torch"),
        decode_engine=replace(config.decode_engine, cpu_kernels="torch"),
    )
    out = io.StringIO()
    prepare_model(wanting, Steps(Console(file=out)))
    assert "operators" not in out.getvalue()
