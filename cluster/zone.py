"""Where a node is: its zone, from the labels that Ray was started with.

Owns the names of the labels. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

# `ray start --labels=…`; KubeRay sets the first from Kubernetes' own label of the node
_LABELS = ("ray.io/availability-zone", "topology.kubernetes.io/zone", "zone")


def zone_of(labels: Mapping[str, object]) -> str:
    """The zone's name; empty where no label tells: then all such nodes count as one zone."""
    return next((str(labels[name]) for name in _LABELS if labels.get(name)), "")
