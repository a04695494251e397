"""The router's application on scripted workers, spoken to without sockets.

Text is that of the byte-level test vocabulary: the scripted "model" answers with its tokens 100..249.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson

from core.ids import WorkerRef
from core.worker_status import Announcement
from router.app import create_app
from router.chat_template import ChatTemplate
from router.config import RouterConfig
from router.served_model import SamplingDefaults, ServedModel
from router.workers import Worker
from tests.doubles import settle
from tests.unit.router import vocabularies
from tests.unit.router.scripted import ScriptedWorker

TOKENIZER = vocabularies.byte_level()


def new_model(
    has_template: bool = True, max_context: int | None = 512, defaults: SamplingDefaults | None = None
) -> ServedModel:
    template = ChatTemplate(vocabularies.CHATML, TOKENIZER.named_tokens, "test") if has_template else None
    return ServedModel(
        "toy", TOKENIZER, template, TOKENIZER.vocab_size, max_context, defaults or SamplingDefaults(), 1
    )


class Members:
    """Who is listed, and how they are reached."""

    def __init__(self, workers: Sequence[ScriptedWorker]) -> None:
        self._workers = workers

    async def announcements(self) -> tuple[Announcement, ...]:
        return tuple(worker.announcement() for worker in self._workers)

    def connect(self, ref: WorkerRef) -> Worker:
        return next(worker for worker in self._workers if worker.ref == ref)


class Api:
    """A client of the application. `events` reads a stream's events."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://localhost"
        )

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **body)

    async def chat(self, content: str = "hi", **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": content}])
        return await self.post("/v1/chat/completions", **body)

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body.setdefault("model", "toy")
        return await self.http.post(path, content=orjson.dumps(body), headers=headers)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of `name` that carry `labels`."""
        total = 0.0
        for line in (await self.http.get("/metrics")).text.splitlines():
            wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
            if line.split("{")[0].split(" ")[0] == name and wanted:
                total += float(line.rsplit(" ", 1)[1])
        return total


@asynccontextmanager
async def serving(
    *workers: ScriptedWorker, model: ServedModel | None = None, **settings: Any
) -> AsyncIterator[Api]:
    """The application with its lifespan around it."""
    members = Members(workers)
    app = create_app(
        RouterConfig(**settings), model or new_model(), members, members.connect, chance=random.Random(1)
    )
    async with app.router.lifespan_context(app):
        await settle()
        api = Api(app)
        async with api.http:
            yield api


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, framing checked; `[DONE]` as None."""
    assert response.headers["content-type"] == "text/event-stream"
    frames = response.content.split(b"\n\n")
    assert frames.pop() == b""
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    return [None if frame == b"data: [DONE]" else orjson.loads(frame[6:]) for frame in frames]
