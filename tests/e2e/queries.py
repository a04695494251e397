"""The queries that an operator's tools ask: those of rules and of dashboards, and the metrics they name.

Owns reading them out of `deploy/`. Values only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.harness import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"

_EXPORTED = re.compile(r"\bbaton_[a-z0-9_]+")
_RECORDED = re.compile(r"\bbaton:[a-z0-9_:]+")
_TAILS = ("_bucket", "_sum", "_count", "_total")


def rules() -> Iterator[dict[str, Any]]:
    for file in sorted((PROMETHEUS / "rules").glob("*.yml")):
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(dashboard / panel, query), with Grafana's variables as text in it."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(file.read_text())
        values = {
            item["name"]: item["current"]["value"]
            for item in board["templating"]["list"]
            if item["type"] == "textbox"
        }
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{board['title']} / {panel['title']}", _filled(target["expr"], values)


def _filled(query: str, values: dict[str, str]) -> str:
    for name, value in {**values, "__rate_interval": "30s", "__range": "30s"}.items():
        query = query.replace(f"${name}", value)
    return query


def named_metrics(query: str) -> set[str]:
    """Families that are exported, as they are called there; those that are recorded, with their colons."""
    return {_family(name) for name in _EXPORTED.findall(query)} | set(_RECORDED.findall(query))


def _family(name: str) -> str:
    for tail in _TAILS:
        name = name.removesuffix(tail)
    return name


def write_configuration(folder: Path, target: str) -> Path:
    """The configuration that is shipped, for `target`, scraping and evaluating each second."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yml")]
    baton = next(job for job in config["scrape_configs"] if job["job_name"] == "baton")
    config["scrape_configs"] = [{**baton, "scrape_timeout": "1s", "static_configs": [{"targets": [target]}]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path
