"""Draining a node of the Ray cluster: it is to go away soon, so nothing new is placed there.

Owns finding the node by what people call it, and telling Ray's control service. Ray Serve does the rest: it
starts each replica of that node anew elsewhere, stops the old one when the new one runs, and at the latest so
long before the deadline that its streams can be finished or moved. Needs an initialised Ray.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from core.errors import InvalidConfig, WorkerError

_PREEMPTED = 2  # DrainNodeReason: the only one that Ray does not refuse while something runs there
_TIMEOUT_S = 10.0


class DrainRefused(WorkerError):
    """Ray does not take the node out."""

    code = "drain_refused"


def find_node(name: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """The id of the living node that `name` means: its id or the beginning of it, address or host name.

    Raises InvalidConfig, with the names that there are, if that is none or more than one.
    """
    alive = [node for node in nodes if node["Alive"]]
    found = [
        str(node["NodeID"])
        for node in alive
        if name in (node["NodeManagerAddress"], node["NodeManagerHostname"])
        or (len(name) >= 4 and node["NodeID"].startswith(name))
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node['NodeID'][:12]} ({node['NodeManagerAddress']})" for node in alive)
    what = "no node is" if not found else "several nodes are"
    raise InvalidConfig(f"{what} called {name[:100]!r}; there are: {known}", key="node")


def drain_node(node_id: str, within_s: float, why: str) -> None:
    """Tell Ray that the node ends in `within_s`. Raises DrainRefused."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline_ms = int((time.time() + within_s) * 1000)
    is_accepted, message = client.drain_node(node_id, _PREEMPTED, why, deadline_ms)
    if not is_accepted:
        raise DrainRefused(f"Ray does not drain {node_id[:12]}: {message}")
