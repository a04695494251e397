"""`baton role`: has a worker of a running service take the other role.

Owns the command line of it; the service itself decides. Main thread.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.operator_call import ask_service
from core.ids import Role


def role(
    worker: Annotated[str, typer.Argument(help="The worker's id, as in metrics and X-Baton-* headers.")],
    wanted: Annotated[Role, typer.Argument(metavar="prefill|decode", help="The role that it is to take.")],
    is_forced: Annotated[
        bool, typer.Option("--force", help="Even if it is the last worker of its role.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="Where the service is; default: on this machine.")] = None,
    port: Annotated[int | None, typer.Option(help="Which service of this machine, by its port.")] = None,
) -> None:
    """Have a worker take another role. Model and cached prefixes stay; what runs on it ends first or moves.

    Needs an operator's key in $BATON_API_KEY where the service asks for keys.
    """
    body = {"worker": worker, "role": wanted.value, "force": is_forced}
    answer = ask_service("/admin/role", body, url, port)
    if not answer["changed"]:
        typer.echo(f"{worker} has the role {wanted} already")
        return
    typer.echo(
        f"{worker} is a {wanted} worker now: left its role in {answer['drain_ms']:.0f} ms, "
        f"started in {answer['start_ms']:.0f} ms"
    )
