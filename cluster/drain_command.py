"""`baton drain`: a worker, or a node with all of its workers, is taken out of service; no stream is lost.

Owns the command line of it, and telling the two apart. A worker is drained by the service itself, over HTTP.
For a node, which is what a spot instance's notice is to name, it joins the Ray cluster as a client of its
own. Main thread.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer
from rich.console import Console

from cluster.operator_call import ask_service
from cluster.ray_environment import auth_environment
from core.errors import InvalidConfig
from core.ids import Role

_NODE_WITHIN_S = 120.0


def drain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|NODE",
            help="A worker's id, as in metrics, or a node: Ray's id of it (or its beginning), address or "
            "host name.",
        ),
    ],
    within_s: Annotated[
        float | None,
        typer.Option(
            "--within",
            min=1.0,
            help="A worker: seconds for what runs to end there (default: cluster.drain_timeout_s). A node: "
            f"until it is taken away (default: {_NODE_WITHIN_S:.0f}).",
        ),
    ] = None,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Even if it is the last worker of its role.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="A worker: where the service is; default: on this machine.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="A worker: which service of this machine, by its port.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A node: its Ray cluster (default: auto, the one of this host).")
    ] = None,
    reason: Annotated[str, typer.Option(help="A node: what Ray's log is to say.")] = "baton drain",
) -> None:
    """Take a worker out of service, in whose place another one is started, or a node that is to go away.

    No stream is lost: it ends there in time, or goes on elsewhere. Needs, for a worker, an operator's key in
    $BATON_API_KEY where the service asks for keys.
    """
    is_service = url is not None or port is not None
    if is_service and address is not None:
        what = "--address is of a node's cluster, --url and --port are of a worker's service"
        raise InvalidConfig(what, key="address")
    if is_service or (address is None and name.startswith(tuple(f"{role}-" for role in Role))):
        _drain_worker(name, within_s, is_forced, url, port)
    else:
        _drain_node(name, _NODE_WITHIN_S if within_s is None else within_s, address or "auto", reason)


def _drain_worker(
    worker: str, within_s: float | None, is_forced: bool, url: str | None, port: int | None
) -> None:
    time_left = {} if within_s is None else {"within_s": within_s}
    ask_service("/admin/drain", {"worker": worker, "force": is_forced, **time_left}, url, port)
    typer.echo(f"{worker} drains; another one is started in its place")


def _drain_node(node: str, within_s: float, address: str, reason: str) -> None:
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
