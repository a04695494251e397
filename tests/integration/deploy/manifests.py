"""The manifests and cluster files of `deploy/`, read. Values only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("aws", "gcp", "on-premise")


def cluster_file(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text())
    return content


def kubernetes_objects() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


def ray_service() -> dict[str, Any]:
    (found,) = [item for item in kubernetes_objects() if item["kind"] == "RayService"]
    return found


def pod_groups() -> dict[str, dict[str, Any]]:
    """Head and worker groups of the RayService, by name."""
    cluster = ray_service()["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster["workerGroupSpecs"]
    }
