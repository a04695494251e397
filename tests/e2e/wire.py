"""A raw HTTP/1.1 client on a socket: sees the bytes that a client library would hide, and can hang up rudely.

Owns one connection, the decoding of chunked bodies and the strict reading of server-sent events. It asserts
nothing about meaning. Blocking; used from the test's thread.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(slots=True)
class RawResponse:
    """Status line, headers (lower-case names) and the decoded body with the arrival time of each piece."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse_constant)


class RawConnection:
    """One request on one TCP connection; `hang_up` ends it by FIN, `reset` by RST."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout_s: float = 120.0) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._buffer = b""
        self._host = f"{host}:{port}"

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", "Accept: */*", "Connection: close"]
        if body is not None:
            lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))

    def read_head(self) -> RawResponse:
        while b"\r\n\r\n" not in self._buffer:
            self._fill()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        assert status_line.startswith("HTTP/1.1 "), status_line
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return RawResponse(int(status_line.split(" ")[1]), headers)

    def pieces(self, response: RawResponse) -> Iterator[bytes]:
        """Body pieces as they arrive; ends where the framing says so, fails on a body that is cut off."""
        if response.headers.get("transfer-encoding", "").lower() == "chunked":
            source = self._chunks()
        else:
            source = self._sized(response.headers.get("content-length"))
        for piece in source:
            response.arrivals.append((time.monotonic(), len(response.body)))
            response.body += piece
            yield piece

    def read_all(self) -> RawResponse:
        response = self.read_head()
        for _ in self.pieces(response):
            pass
        return response

    def hang_up(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Close so that the peer sees a reset instead of an orderly end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size = int(self._line().split(b";")[0], 16)
            data = self._exactly(size)
            assert self._line() == b"", "chunk without its line end"
            if size == 0:
                return
            yield data

    def _sized(self, length: str | None) -> Iterator[bytes]:
        if length is not None:
            data = self._exactly(int(length))
            if data:
                yield data
            return
        while True:
            if self._buffer:
                piece, self._buffer = self._buffer, b""
                yield piece
            piece = self._socket.recv(65536)
            if not piece:
                return
            yield piece

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _fill(self) -> None:
        piece = self._socket.recv(65536)
        if not piece:
            raise ConnectionError(
                f"the server hung up in the middle of an answer; unread: {self._buffer[:200]!r}"
            )
        self._buffer += piece


def request(port: int, method: str, path: str, body: bytes | None = None, **kwargs: Any) -> RawResponse:
    """One whole exchange."""
    with RawConnection(port) as connection:
        connection.send(method, path, body, **kwargs)
        return connection.read_all()


def parse_events(body: bytes) -> list[Any]:
    """The JSON values of a finished event stream.

    Strict: each event is one `data: ` line and a blank line, nothing else, and the last is `[DONE]`.
    """
    text = body.decode("utf-8")
    assert text.endswith("\n\n"), f"the stream does not end with a blank line: {text[-80:]!r}"
    values: list[Any] = []
    events = text[:-2].split("\n\n")
    for event in events:
        assert "\n" not in event, f"an event of several lines: {event!r}"
        assert "\r" not in event, f"a carriage return in an event: {event!r}"
        assert event.startswith("data: "), f"an event that is not data: {event!r}"
        values.append(event.removeprefix("data: "))
    assert values, "an event stream without events"
    assert values[-1] == DONE, f"the last event is {values[-1]!r}"
    assert DONE not in values[:-1], "more than one [DONE]"
    return [strict_json(value) for value in values[:-1]]


def strict_json(text: str | bytes) -> Any:
    """JSON without the NaN and Infinity that Python would let pass."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
