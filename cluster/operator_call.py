"""What an operator's command asks of a running service, over HTTP, and what it says if that is refused.

Owns finding the service on this machine, the operator's key, and turning a refusal into one line. Main
thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

from cluster.run_directory import read_note, run_directories
from cluster.sample import client
from core.errors import InvalidConfig, ServingError

KEY_VARIABLE = "BATON_API_KEY"
_TIMEOUT_S = 90.0


def ask_service(path: str, body: Mapping[str, object], url: str | None, port: int | None) -> dict[str, Any]:
    """The service's answer to a POST of `body`: that at `url`, or the one of this machine (on `port`). Raises
    InvalidConfig if there is not exactly one, ServingError with its words if it refuses.
    """
    address = (url or url_here(port)).rstrip("/")
    with client(os.environ.get(KEY_VARIABLE), _TIMEOUT_S) as http:
        try:
            response = http.post(f"{address}{path}", json=dict(body))
        except httpx.TransportError as error:
            raise ServingError(f"{address} does not answer: {type(error).__name__}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise ServingError(_refusal(response))
    answer: dict[str, Any] = response.json()
    return answer


def url_here(port: int | None) -> str:
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
