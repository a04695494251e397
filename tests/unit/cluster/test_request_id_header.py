"""Of the request ids that are put into an answer's head, the router's is left."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from cluster.ray_environment import IngressPorts, serve_environment
from cluster.request_id_header import OneRequestId


def sent_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(OneRequestId(app)({"type": "http"}, receive, send))
    assert sent[1] == {"type": "http.response.body", "body": b"x"}
    found: list[tuple[bytes, bytes]] = sent[0]["headers"]
    return found


def test_the_first_of_two_request_ids_is_sent() -> None:
    one, other, two = (b"x-request-id", b"ours"), (b"content-type", b"text/plain"), (b"X-Request-ID", b"its")
    assert sent_headers([one, other, two]) == [one, other]


def test_other_headers_may_come_twice() -> None:
    twice = [(b"set-cookie", b"a"), (b"set-cookie", b"b")]
    assert sent_headers(twice) == twice


def test_serve_is_told_of_a_function_that_exists(tmp_path: Any) -> None:
    ports = IngressPorts(1, 2, 3, 4)
    module, name = serve_environment(tmp_path, ports)["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].split(":")
    (middleware,) = getattr(importlib.import_module(module), name)()
    assert middleware.cls is OneRequestId
