"""`baton drain`: a node is to go away; its workers are started elsewhere and its streams move.

Owns the command line of it. This is what a spot instance's notice is to call. Joins the Ray cluster as a
client of its own. Main thread.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer
from rich.console import Console

from cluster.ray_environment import auth_environment


def drain(
    node: Annotated[
        str, typer.Argument(help="Ray's id of the node (or its beginning), address or host name.")
    ],
    within_s: Annotated[
        float, typer.Option("--within", min=1.0, help="Seconds until the node is taken away.")
    ] = 120.0,
    address: Annotated[str, typer.Option(help="The Ray cluster; auto: the one of this host.")] = "auto",
    reason: Annotated[str, typer.Option(help="What Ray's log is to say.")] = "baton drain",
) -> None:
    """Take a node out of service before it goes away: no stream is lost."""
    os.environ.update(auth_environment(is_own=False, environment=os.environ))
    import ray

    from cluster.node_drain import drain_node, find_node

    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        node_id = find_node(node, ray.nodes())
        drain_node(node_id, within_s, reason)
        Console(highlight=False).print(f"{node_id[:12]} drains; its replicas are started elsewhere")
    finally:
        ray.shutdown()
