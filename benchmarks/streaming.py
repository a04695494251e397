"""Call: one streamed completion against an OpenAI-compatible server on this machine, timed at the client.

Owns the HTTP exchange, the moment at which each piece of text arrived, and the proof that the stream is
complete: status 200, the body ended as HTTP says, `[DONE]` seen, the finish reason is the length that was
asked for, and the server counted that many tokens. Anything else raises BrokenStream, so that a stream that
was cut short never becomes a fast one. It speaks plain sockets, because a client library costs more
processor time per event than a small model's server does. Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

HOST = "127.0.0.1"
TIMEOUT_S = 900.0
# Tokenizers of one model agree within a token or two at the ends of a text.
PROMPT_TOLERANCE = 2
_READ_LIMIT = 1 << 20


class BrokenStream(Exception):
    """The answer was not the complete stream that was asked for; says in which way."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of `num_prompt_tokens` tokens, to be continued greedily by exactly `max_tokens`."""

    prompt: str
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and the name of its model."""

    port: int
    model: str


@dataclass(frozen=True, slots=True)
class Stream:
    """A complete answer. Seconds on one monotonic clock: `due_at` before connecting, `times` at each event
    with text, `ended_at` at `[DONE]`. Token counts are the server's.
    """

    due_at: float
    times: tuple[float, ...]
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    text: str


class Call:
    """One request: `run` it once. `times` fills while it runs and may be watched."""

    def __init__(self, endpoint: Endpoint, ask: Ask) -> None:
        self.times: list[float] = []
        self._endpoint = endpoint
        self._ask = ask
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._done_at: float | None = None

    async def run(self) -> Stream:
        """Raises BrokenStream, OSError, or TimeoutError after fifteen minutes."""
        due_at = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, self._endpoint.port, limit=_READ_LIMIT)
            try:
                writer.write(_head("POST", "/v1/completions", self._body()))
                return await self.read(reader, due_at)
            finally:
                writer.close()

    async def read(self, reader: asyncio.StreamReader, due_at: float) -> Stream:
        """The answer to a request that was sent; raises BrokenStream."""
        status, headers = await _response_head(reader)
        pieces = _body_pieces(reader, headers)
        if status != 200:
            text = b"".join([piece async for piece in pieces])
            raise BrokenStream(f"status {status}: {text[:500].decode('utf-8', 'replace')}")
        rest = b""
        async for piece in pieces:
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._take(line.strip(), now)
        return self._completed(due_at)

    def _body(self) -> bytes:
        return orjson.dumps(
            {
                "model": self._endpoint.model,
                "prompt": self._ask.prompt,
                "max_tokens": self._ask.max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _take(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done_at = now
            return
        event = orjson.loads(data)
        if event.get("error"):
            raise BrokenStream(f"an error after {len(self.times)} events: {event['error']}")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if choice.get("text"):
                self.times.append(now)
                self._texts.append(choice["text"])

    def _completed(self, due_at: float) -> Stream:
        asked, counted = self._ask, self._usage
        if self._done_at is None:
            raise BrokenStream(f"the stream ended without [DONE] after {len(self.times)} events")
        if self._finish_reason != "length":
            raise BrokenStream(f"finish reason {self._finish_reason} instead of length")
        if counted.get("completion_tokens") != asked.max_tokens:
            raise BrokenStream(f"{counted.get('completion_tokens')} tokens instead of {asked.max_tokens}")
        if abs(counted.get("prompt_tokens", 0) - asked.num_prompt_tokens) > PROMPT_TOLERANCE:
            raise BrokenStream(
                f"the server read {counted.get('prompt_tokens')} prompt tokens, not {asked.num_prompt_tokens}"
            )
        if not self.times:
            raise BrokenStream("no text at all")
        return Stream(
            due_at=due_at,
            times=tuple(self.times),
            ended_at=self._done_at,
            num_prompt_tokens=counted["prompt_tokens"],
            num_output_tokens=counted["completion_tokens"],
            num_cached_tokens=(counted.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            text="".join(self._texts),
        )


async def fetch(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError while nothing listens, BrokenStream for a body cut short."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(HOST, port, limit=_READ_LIMIT)
        try:
            writer.write(_head("GET", path, b""))
            status, headers = await _response_head(reader)
            return status, b"".join([piece async for piece in _body_pieces(reader, headers)])
        finally:
            writer.close()


def _head(method: str, path: str, body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Accept: */*", "Connection: close"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _response_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise BrokenStream("the connection closed before the answer began") from error
    status_line, *lines = head.decode("latin-1").rstrip().split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return int(status_line.split()[1]), headers


async def _body_pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises BrokenStream when it stops before its end."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await reader.read(_READ_LIMIT):
                yield piece
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise BrokenStream("the connection was cut in the middle of the answer") from error
