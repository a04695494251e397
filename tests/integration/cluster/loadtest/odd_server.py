"""OddServer: a real HTTP server that speaks OpenAI's completions and misbehaves as it is told.

The model's name says how: each word is one rule, `slow:0.2 halves`. Owns the server's task and port; runs on
the test's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN_S = 0.005


class Cut(Exception):
    """Ends the connection in the middle of the body."""


class OddServer:
    """`bodies`: what was asked. A token is a word; the prompt's overhead is two."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.outcomes: Counter[str] = Counter()
        self.port = 0
        self._num_places = asyncio.Semaphore(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OddServer]:
        routes = [
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=0, log_level="critical", lifespan="off"
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await task

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "plain"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        rules = dict(word.partition(":")[::2] for word in body["model"].split())
        number = len(self.bodies)
        if "busy" in rules and number % 3 == 0:
            return PlainTextResponse("too many", status_code=int(rules["busy"]), headers={"Retry-After": "1"})
        if "broken" in rules:
            return PlainTextResponse("out of order", status_code=500)
        if "page" in rules:
            return PlainTextResponse("<html>", media_type="text/html")
        return StreamingResponse(self._stream(body, rules), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], rules: dict[str, str]) -> AsyncIterator[bytes]:
        is_chat = "messages" in body
        said = " ".join(m["content"] for m in body["messages"]) if is_chat else body["prompt"]
        if is_chat:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if "queue" in rules:  # one request at a time, each for so long
            async with self._num_places:
                await asyncio.sleep(float(rules["queue"]))
        await asyncio.sleep(float(rules.get("slow", 0)))
        count = body["max_tokens"] - ("short" in rules)
        at_once = int(rules.get("at-once", 1))
        for start in range(0, count, at_once):
            await asyncio.sleep(TOKEN_S)
            words = " x" * min(at_once, count - start)
            piece = piece_of(is_chat, words)
            if "halves" in rules:
                yield piece[:11]
                await asyncio.sleep(TOKEN_S)
                piece = piece[11:]
            if start >= 2 * at_once:
                for fault, text in FAULTS.items():
                    if fault in rules:
                        yield text
                        return
                if "cut" in rules:
                    raise Cut
                if "hang" in rules:
                    await asyncio.sleep(60)
            yield piece
        yield piece_of(is_chat, "", "length")
        if "uncounted" not in rules:
            counts = {"prompt_tokens": len(said.split()) + 2, "completion_tokens": count}
            yield event({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 1}}})
        if "unfinished" not in rules:
            yield b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def piece_of(is_chat: bool, text: str, finish_reason: str | None = None) -> bytes:
    content = {"delta": {"content": text}} if is_chat else {"text": text}
    return event({"choices": [{"index": 0, **content, "finish_reason": finish_reason}]})


FAULTS = {
    "malformed": b'data: {"choices": [{"text": \n\n',
    "error-event": event({"error": {"message": "a worker was lost", "code": "worker_lost"}}),
    "early-done": b"data: [DONE]\n\n",
    "early-end": b"",
    "half-event": b'data: {"choi',
}
