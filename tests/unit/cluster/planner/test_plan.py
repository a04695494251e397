"""A plan keeps its targets with the fewest GPUs, and says what it assumed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.planner.capacity import Shares
from cluster.planner.hardware import Catalogue
from cluster.planner.model_config import model_shape
from cluster.planner.plan import Targets, Workload, make_plan
from cluster.planner.waiting import waiting_quantile_s
from core.errors import InvalidConfig
from tests.unit.cluster.planner.model_configs import LLAMA_3_70B

_LLAMA = model_shape(LLAMA_3_70B, "llama-3-70b")
_H100 = Catalogue().gpu("h100")
_TARGETS = Targets(ttft_s=2.0, itl_s=0.05)


def _plan(rate: float, isl: int = 4096, osl: int = 512, targets: Targets = _TARGETS):  # type: ignore[no-untyped-def]
    return make_plan(_LLAMA, _H100, Workload(isl, osl, rate), targets, Shares())


def test_pools_keep_the_targets_and_one_worker_less_would_not() -> None:
    plan = _plan(rate=20)
    assert plan.prefill.latency_s <= _TARGETS.ttft_s
    assert plan.decode.latency_s <= _TARGETS.itl_s
    assert plan.prefill.usage <= 0.8
    assert plan.decode.usage <= 0.8
    service_s = plan.prefill.capacity.prefill_s(4096)
    fewer = plan.prefill.num_workers - 1
    is_too_slow = service_s + waiting_quantile_s(fewer, 20, service_s, 0.9) > _TARGETS.ttft_s
    assert is_too_slow or 20 * service_s / fewer > 0.8


def test_longer_prompts_shift_the_ratio_to_prefill_and_longer_answers_to_decode() -> None:
    assert _plan(20, isl=8192, osl=128).ratio > _plan(20).ratio > _plan(20, isl=1024, osl=2048).ratio


def test_twice_the_rate_takes_about_twice_the_gpus() -> None:
    assert _plan(200).num_gpus == pytest.approx(2 * _plan(100).num_gpus, rel=0.1)


def test_targets_out_of_reach_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="first token") as error:
        _plan(1, targets=Targets(0.01, 0.05))
    assert error.value.details["key"] == "slo-ttft"
    with pytest.raises(InvalidConfig, match="tokens within"):
        _plan(1, targets=Targets(2.0, 0.001))
    with pytest.raises(InvalidConfig, match="needs 143 GB"):
        make_plan(_LLAMA, Catalogue().gpu("l4"), Workload(4096, 512, 1), _TARGETS, Shares(), 1)


def test_cost_is_gpus_times_price_over_tokens() -> None:
    plan = _plan(20)
    outputs, both = plan.usd_per_million(3.6)
    assert outputs == pytest.approx(plan.num_gpus * 0.001 / (20 * 512) * 1e6)
    assert both == pytest.approx(outputs * 512 / (4096 + 512))


def test_the_wait_is_endless_without_spare_capacity_and_short_with_much() -> None:
    assert waiting_quantile_s(2, 2.0, 1.0, 0.9) == math.inf
    assert waiting_quantile_s(10, 1.0, 1.0, 0.9) == 0.0
    # one server, half busy: Erlang C is the load, and service is constant
    assert waiting_quantile_s(1, 0.5, 1.0, 0.9) == pytest.approx(math.log(0.5 / 0.1))


def test_the_command_prints_the_known_numbers_and_its_assumptions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    arguments = [
        "plan",
        "--model",
        str(tmp_path),
        "--gpu",
        "h100",
        "--isl",
        "7680",
        "--osl",
        "512",
        "--rate",
        "4",
    ]
    result = CliRunner().invoke(app, [*arguments, "--params", "70e9", "--gpus-per-worker", "4"])
    assert result.exit_code == 0, result.output
    for text in (
        "320.0 KiB",
        "2.68 GB",
        "55",
        "3.7 tokens per verify",
        "Assumptions",
        "config.json counts 70.55 B",
    ):
        assert text in result.output
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert report["decode"]["latency_s"] <= 0.05
    assert (
        report["usd_per_million"]["spot"]["output_tokens"]
        < report["usd_per_million"]["on_demand"]["output_tokens"]
    )


def test_weights_that_the_file_does_not_tell_are_taken_from_the_command_line(tmp_path: Path) -> None:
    novel = LLAMA_3_70B | {"quantization_config": {"quant_method": "novel"}}
    (tmp_path / "config.json").write_text(json.dumps(novel))
    arguments = ["plan", "--model", str(tmp_path), "--gpu", "h100", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, InvalidConfig)
    assert "--weights" in result.exception.message
    report = json.loads(CliRunner().invoke(app, [*arguments, "--weights", "int4"]).output)
    assert report["model"]["weight_bytes"] == pytest.approx(70.55e9 / 2, rel=0.001)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(["--gpu", "voodoo"], "known are"), (["--weights", "fp3"], "fp8"), (["--link", "string"], "ib-ndr")],
)
def test_wrong_input_names_what_is_possible(tmp_path: Path, wrong: list[str], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpu", "h100", *wrong])
    assert isinstance(result.exception, InvalidConfig)
    assert named in result.exception.message


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "0"])
@pytest.mark.parametrize(
    "option",
    ["--rate", "--slo-ttft", "--slo-itl", "--params", "--spec-cost", "--price-spot", "--memory-share"],
)
def test_numbers_with_which_nothing_can_be_counted_are_refused(
    tmp_path: Path, option: str, number: str
) -> None:
    if (option, number) == ("--spec-cost", "0"):
        return
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpu", "h100", option, number])
    assert isinstance(result.exception, InvalidConfig)


def test_a_rate_beyond_any_service_is_refused_instead_of_counted_up_to() -> None:
    with pytest.raises(InvalidConfig, match="at most 1e"):
        _plan(1e300)
