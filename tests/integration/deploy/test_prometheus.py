"""Rules and configuration of Prometheus hold before its own tool, and each alert has a way out in the guide.

promtool comes with Debian's package `prometheus`; without it the tests that need it skip.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).resolve().parents[3]
_PROMETHEUS = _ROOT / "deploy" / "prometheus"
_PROMTOOL = shutil.which("promtool")
_needs_promtool = pytest.mark.skipif(
    _PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)"
)


def _promtool(*arguments: str) -> str:
    assert _PROMTOOL is not None
    done = subprocess.run([_PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _rules() -> list[dict[str, Any]]:
    files = sorted((_PROMETHEUS / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def _tests() -> list[Path]:
    return sorted((_PROMETHEUS / "tests").glob("*_test.yml"))


@_needs_promtool
def test_rules_and_configuration_are_valid() -> None:
    _promtool("check", "rules", *map(str, sorted((_PROMETHEUS / "rules").glob("*.yml"))))
    _promtool("check", "config", str(_PROMETHEUS / "prometheus.yml"))


@_needs_promtool
def test_each_alert_fires_when_it_must_and_only_then() -> None:
    _promtool("test", "rules", *map(str, _tests()))


def test_each_alert_is_tested_firing_and_silent() -> None:
    contents = [yaml.safe_load(file.read_text()) for file in _tests()]
    cases = [case for content in contents for test in content["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in _rules() if "alert" in rule}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_each_alert_has_its_section_in_the_operations_guide() -> None:
    headings = {
        line.lstrip("# ").strip().lower()
        for line in (_ROOT / "docs" / "operations.md").read_text().splitlines()
        if line.startswith("#")
    }
    for rule in _rules():
        if "alert" in rule:
            file, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert (file, anchor) == ("docs/operations.md", rule["alert"].lower())
            assert anchor in headings
