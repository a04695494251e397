"""Reading a request's body and noticing that its sender has gone. Owns the limits of size and time. Lives on
the event loop.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from core.errors import Cancelled, RequestError


class BodyTooLarge(RequestError):
    code = "request_too_large"
    http_status = 413


class BodyEncoded(RequestError):
    code = "unsupported_encoding"
    http_status = 415


class BodyTooSlow(RequestError):
    code = "request_timeout"
    http_status = 408


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyEncoded for a compressed one, BodyTooLarge as soon as it is known to be,
    BodyTooSlow if it is not there in time, Cancelled if the client goes away.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(scope, receive, max_bytes)
    except TimeoutError:
        raise BodyTooSlow("the deadline passed before the body was complete") from None


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            told = f"a body in {value[:40].decode('latin-1')!r} is not read: send it without Content-Encoding"
            raise BodyEncoded(told, param="Content-Encoding")
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away before its request was complete")
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def wait_for_disconnect(receive: Receive) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")
