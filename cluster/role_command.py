"""`baton role`: has a worker of a running service take the other role.

Owns the command line of it, and finding the service on this machine; the service itself decides. Main thread.
"""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from cluster.run_directory import read_note, run_directories
from cluster.sample import client
from core.errors import InvalidConfig, ServingError
from core.ids import Role

KEY_VARIABLE = "BATON_API_KEY"
_TIMEOUT_S = 90.0


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
    address = (url or _url_here(port)).rstrip("/")
    with client(os.environ.get(KEY_VARIABLE), _TIMEOUT_S) as http:
        try:
            response = http.post(f"{address}/admin/role", json=body)
        except httpx.TransportError as error:
            raise ServingError(f"{address} does not answer: {type(error).__name__}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise ServingError(_refusal(response))
    answer = response.json()
    if not answer["changed"]:
        typer.echo(f"{worker} has the role {wanted} already")
        return
    typer.echo(
        f"{worker} is a {wanted} worker now: left its role in {answer['drain_ms']:.0f} ms, "
        f"started in {answer['start_ms']:.0f} ms"
    )


def _url_here(port: int | None) -> str:
    """The one service of this user on this machine (on `port`)."""
    notes = [note for path in run_directories() if (note := read_note(path)) is not None]
    urls = [note.url for note in notes if port is None or note.url.endswith(f":{port}")]
    if not urls:
        where = "on this machine" if port is None else f"on port {port} of this machine"
        raise InvalidConfig(f"no service of yours runs {where}; give --url", key="url")
    if len(urls) > 1:
        raise InvalidConfig(f"which service? --port of one of {', '.join(sorted(urls))}", key="port")
    return urls[0]


def _refusal(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered {response.status_code}: {response.text[:300]}"
    if error.get("code") == "last_of_role":
        return f"{message}; --force does it all the same"
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return f"{message} (an operator's key in ${KEY_VARIABLE})"
    return message
