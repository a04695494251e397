"""Eavesdropper: passes bytes between clients and a server on, and notes when a request came and when the
first text of its answer went back.

Owns the relay's sockets and its clock; measures at the socket, without the client that is to be checked. A
thread with a loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_TEXT = re.compile(rb'"(?:content|text)":\s*"[^"]')
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Overheard:
    """Seconds from a request's last byte to the first event with text, and to the last word."""

    ttft_s: float | None = None
    e2e_s: float | None = None


@dataclass(slots=True)
class Eavesdropper:
    """`heard`: one for each connection, in the order of their requests."""

    server_port: int
    port: int = 0
    heard: list[Overheard] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Eavesdropper]:
        loop, is_up = asyncio.new_event_loop(), threading.Event()

        async def listen() -> asyncio.Server:
            server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            is_up.set()
            return server

        def work() -> None:
            server = loop.run_until_complete(listen())
            loop.run_forever()
            server.close()

        thread = threading.Thread(target=work, name="eavesdropper")
        thread.start()
        is_up.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.server_port)
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(found[1])) if found else b""
        asked_at, note, seen = time.perf_counter(), Overheard(), b""
        self.heard.append(note)
        downstream.write(head + body)
        with contextlib.suppress(ConnectionError):
            while piece := await upstream.read(1 << 16):
                now = time.perf_counter() - asked_at
                seen += piece
                if note.ttft_s is None and _TEXT.search(seen):
                    note.ttft_s = now
                if note.e2e_s is None and _DONE in seen:
                    note.e2e_s = now
                writer.write(piece)
                await writer.drain()
        downstream.close()
        writer.close()
