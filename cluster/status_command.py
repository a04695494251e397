"""`baton status`: the workers of a running service, how loaded they are, and by which way KV goes between
them.

Owns finding the service, asking its router as an operator, and the tables; what is told belongs to the
router's status page. Main thread.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.run_directory import read_note, run_directories
from core.errors import InvalidConfig, ServingError

KEY_VARIABLE = "BATON_API_KEY"
_TIMEOUT_S = 5.0

_Url = Annotated[str | None, typer.Option("--url", help="The service, if it was not started here.")]
_Port = Annotated[int | None, typer.Option(help="Only the service on this port, of those started here.")]
_IsJson = Annotated[bool, typer.Option("--json", help="Print what the routers tell, one object a service.")]


def status(url: _Url = None, port: _Port = None, is_json: _IsJson = False) -> None:
    """Show workers, load, KV and the ways between them.

    Where the service asks for keys, an operator's is read from $BATON_API_KEY.
    """
    console = Console(highlight=False)
    for service in _services(url, port):
        state = fetch_state(service, os.environ.get(KEY_VARIABLE))
        if is_json:
            console.print(json.dumps({"url": service, **state}), soft_wrap=True, markup=False)
        else:
            show(service, state, console)


def _services(url: str | None, port: int | None) -> list[str]:
    """Raises InvalidConfig if none is known."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(f"--url {url}: begins with http:// or https://", key="--url")
        return [url.rstrip("/")]
    notes = [note for path in run_directories() if (note := read_note(path)) is not None]
    urls = [note.url for note in notes if port is None or note.url.endswith(f":{port}")]
    if not urls:
        where = "" if port is None else f" on port {port}"
        raise InvalidConfig(
            f"no service that this user has started with `baton serve` runs here{where}; --url names another",
            key="--url",
        )
    return urls


def fetch_state(url: str, key: str | None) -> dict[str, Any]:
    """What the router at `url` tells an operator. Raises ServingError saying why it does not."""
    request = urllib.request.Request(f"{url}/dashboard/state")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            state = json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        raise ServingError(_refusal(url, error.code, bool(key))) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServingError(f"the service at {url} does not answer: {reason}") from error
    if not isinstance(state, dict) or "workers" not in state:
        raise ServingError(f"what answers at {url} is no Baton router")
    return state


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to whom it was meant for, or to nobody."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Followed nowhere."""


def _refusal(url: str, code: int, has_key: bool) -> str:
    if code == 403 and not has_key:
        return f"the service at {url} tells its state only where it is asked for by `localhost` or an address"
    if code in (401, 403):
        problem = f"${KEY_VARIABLE} is not set"
        if has_key:
            problem = f"the key in ${KEY_VARIABLE} is not one"
        return f"the service at {url} tells its state only with an operator's API key: {problem}"
    if code == 404:
        return f"what answers at {url} is no Baton router"
    return f"the service at {url} answers with HTTP status {code}"


def show(url: str, state: dict[str, Any], console: Console) -> None:
    """Two tables: the workers, and the pairs that hand KV over."""
    router = state["router"]
    load = f"{router['running']} running, {router['waiting']} waiting"
    console.print(f"[bold]{escape(url)}[/] serves {escape(router['model'])}: {load}")
    workers = Table("worker", "role", "epoch", "state", "running", "waiting", "KV held", "cached", "step ms")
    pairs = Table("KV from", "to", "by", "GB/s", "handed over", "fallbacks", "state")
    for worker in state["workers"]:
        workers.add_row(*map(escape, _worker_row(worker)))
        for pair in (worker["status"] or {}).get("pairs", []):
            pairs.add_row(*map(escape, [worker["id"], *_pair_row(pair)]))
    console.print(workers)
    if pairs.row_count:
        console.print(pairs)
    else:
        console.print("no KV is handed over between workers yet")


def _worker_row(worker: dict[str, Any]) -> list[str]:
    role, home = worker["role"], worker["home_role"]
    at_present = role if role == home else f"{role} (home {home})"
    names = [worker["id"], at_present, worker["epoch"], worker["state"]]
    status = worker["status"]
    if status is None:
        return [*names, *["?"] * 5]
    blocks = status["blocks"]
    return [
        *names,
        f"{status['running']}/{status['max_running']}",
        f"{status['waiting']} ({status['waiting_tokens']} tokens)",
        f"{100 * status['kv_utilization']:.0f} % of {sum(blocks.values())}",
        str(blocks["cached"]),
        f"{status['step_ms']:.1f}" if status["step_ms"] else "–",
    ]


def _pair_row(pair: dict[str, Any]) -> list[str]:
    rate = pair["gb_per_s"]
    return [
        pair["to"],
        pair["transport"] or "–",
        "–" if rate is None else f"{rate:.2f}",
        _counts({way: f"{count / 1e6:.1f} MB" for way, count in pair["bytes"].items()}),
        _counts(pair["fallbacks"]),
        pair["problem"] or ("ready" if pair["is_warm"] or pair["transport"] else "–"),
    ]


def _counts(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.items()) or "–"
