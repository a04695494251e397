"""`baton config` prints what holds, what Serve deploys, and what `ray start` needs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import config_from_settings
from core.errors import InvalidConfig
from router.api_keys import KeyScope, new_entry, new_key, new_salt


def _validate(told: Any) -> None:
    """Raises where Serve would. Importing Ray warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.schema import ServeDeploySchema
    ServeDeploySchema.model_validate(told)


def _run(*arguments: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, ["config", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_settings_that_hold_can_be_read_back_as_they_are() -> None:
    told = yaml.safe_load(_run("--engine.block_size=32", "--cluster.num_decode_workers", "3"))
    config = config_from_settings(told)
    assert config.decode_engine.block_size == 32
    assert config.cluster.num_decode_workers == 3


def test_serves_file_is_one_that_serve_accepts_and_carries_the_settings_given(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("cluster: {num_prefill_workers: 2, port: 8100}\nrouter: {plan: remote}\n")
    told = yaml.safe_load(_run("--config", str(file), "--serve", "--engine.block_size=32"))
    _validate(told)
    (application,) = told["applications"]
    assert application["import_path"] == "cluster.declared_app:application"
    assert application["args"] == {
        "cluster": {"num_prefill_workers": 2, "port": 8100},
        "router": {"plan": "remote"},
        "engine": {"block_size": "32"},
    }
    assert told["http_options"] == {"host": "127.0.0.1", "port": 8100, "request_timeout_s": None}


def test_serves_file_has_the_autoscaler_where_it_is_on() -> None:
    told = yaml.safe_load(_run("--serve", "--autoscaling.is_enabled=true"))
    _validate(told)
    policy = told["applications"][0]["autoscaling_policy"]
    assert policy["policy_function"] == "cluster.autoscaler.policy:ScalingPolicy"


def test_keys_never_stand_in_serves_file_and_are_hidden_elsewhere(tmp_path: Path) -> None:
    entry = new_entry(new_key(), "acme", new_salt(), KeyScope.CLIENT).as_text()
    settings: dict[str, Any] = {"router": {"tenants": {"keys": [entry]}}}
    file = tmp_path / "baton.yaml"
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(InvalidConfig, match="keys_file"):
        _run("--config", str(file), "--serve")
    assert entry not in _run("--config", str(file))


def test_the_environment_of_ray_start_is_shell_lines() -> None:
    lines = _run("--environment").splitlines()
    assert all(line.startswith("export ") for line in lines)
    assert "export RAY_SERVE_ENABLE_HA_PROXY=1" in lines
    assert "export RAY_AUTH_MODE=token" in lines


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.block_sise"):
        _run("--engine.block_sise=16")
