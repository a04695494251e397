"""One X-Request-Id in each answer. Ray Serve adds its own behind the router's.

Owns taking the second one away again: Serve calls `serve_middlewares` in the processes that answer HTTP
(RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH) and puts what it returns around its own middleware. Runs on each
server's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = b"x-request-id"

_Header = tuple[bytes, bytes]


class OneRequestId:
    """ASGI middleware: of several X-Request-Id headers of an answer, the first one is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_one(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _first_only(message.get("headers", ()))}
            await send(message)

        await self._app(scope, receive, send_one)


def serve_middlewares() -> list[Any]:
    """What Serve is to put around its HTTP applications."""
    return [Middleware(OneRequestId)]


def _first_only(headers: Iterable[_Header]) -> list[_Header]:
    found: list[_Header] = []
    for name, value in headers:
        if name.lower() != _NAME or not any(other.lower() == _NAME for other, _ in found):
            found.append((name, value))
    return found
