"""Reply: one HTTP response, sent once: a JSON body, or a head and then frames.

Owns the state of a response (nothing sent, head sent, done), so that whoever meets an error knows what can
still be said. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Send


class Reply:
    """`headers` go with whatever is sent; add to them before the head is out. `status` is 0 until then.
    `is_complete`: nothing more will be sent.
    """

    def __init__(self, send: Send) -> None:
        self.headers: dict[str, str] = {}
        self.status = 0
        self.is_complete = False
        self._send = send

    @property
    def is_started(self) -> bool:
        return self.status != 0

    async def json(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole response."""
        data = orjson.dumps(body)
        extra = {"content-length": str(len(data)), **(headers or {})}
        await self.start("application/json", status, extra)
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": data})

    async def start(
        self, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The head; frames follow."""
        assert not self.is_started
        self.status = status
        lines = {"content-type": content_type, **self.headers, **(headers or {})}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": b""})
