"""Client: what the tests ask of a running system, over real HTTP.

Owns request bodies and their transport; meaning is in `answers`. Thread-safe: each call opens its own
connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from tests.e2e import answers, wire
from tests.e2e.answers import Answer

T = TypeVar("T")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(slots=True)
class Streamed:
    """A finished stream: its events, its choices, and when the first piece with text came."""

    events: list[dict[str, Any]]
    choices: list[Answer]
    response: wire.RawResponse
    sent_at: float

    @property
    def only(self) -> Answer:
        assert len(self.choices) == 1, f"{len(self.choices)} choices"
        return self.choices[0]


class Client:
    """Talks to one system; `model` is put into each body that names none, the key into each head."""

    def __init__(self, port: int, timeout_s: float = 120.0, api_key: str | None = None) -> None:
        self.port = port
        self.headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self.model = self.models()[0]["id"]

    def models(self) -> list[dict[str, Any]]:
        response = wire.request(self.port, "GET", "/v1/models", headers=self.headers)
        assert response.status == 200, response.body
        body = response.json()
        assert body["object"] == "list"
        models: list[dict[str, Any]] = body["data"]
        return models

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> wire.RawResponse:
        """One exchange, whatever its status; dictionaries get the model's name."""
        with wire.RawConnection(self.port, timeout_s=self._timeout_s) as connection:
            connection.send("POST", path, self.encode(body), headers={**self.headers, **(headers or {})})
            return connection.read_all()

    def open(self, path: str, body: dict[str, Any]) -> wire.RawConnection:
        """A connection with the request sent and nothing read."""
        connection = wire.RawConnection(self.port, timeout_s=self._timeout_s)
        connection.send("POST", path, self.encode(body), headers=self.headers)
        return connection

    def encode(self, body: Any) -> bytes:
        if isinstance(body, bytes):
            return body
        if isinstance(body, dict):
            body = {"model": self.model, **body}
        return orjson.dumps(body)

    def answer_all(self, path: str, **body: Any) -> list[Answer]:
        """All choices of a request that must succeed and is not streamed."""
        response = self.post(path, body)
        assert response.status == 200, f"{response.status}: {response.body.decode()[:600]}"
        assert response.headers["content-type"].startswith("application/json")
        return answers.of_response(response.json())

    def complete(self, prompt: str | Sequence[int], **body: Any) -> Answer:
        """The only choice of a completion."""
        (answer,) = self.answer_all(COMPLETIONS, prompt=prompt, **body)
        return answer

    def chat(self, messages: str | list[dict[str, Any]], **body: Any) -> Answer:
        """The only choice of a chat completion; a plain string is one user message."""
        (answer,) = self.answer_all(CHAT, messages=as_messages(messages), **body)
        return answer

    def stream(self, path: str, **body: Any) -> Streamed:
        """A stream that must succeed; asks for usage unless `stream_options` says otherwise."""
        body.setdefault("stream_options", {"include_usage": True})
        if body["stream_options"] == "absent":
            del body["stream_options"]
        sent_at = time.monotonic()
        response = self.post(path, {**body, "stream": True})
        assert response.status == 200, f"{response.status}: {response.body.decode()[:600]}"
        assert response.headers["content-type"].split(";")[0] == "text/event-stream", response.headers
        events = wire.parse_events(response.body)
        has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return Streamed(events, answers.of_stream(events, has_usage), response, sent_at)

    def stream_completion(self, prompt: str | Sequence[int], **body: Any) -> Answer:
        return self.stream(COMPLETIONS, prompt=prompt, **body).only

    def stream_chat(self, messages: str | list[dict[str, Any]], **body: Any) -> Answer:
        return self.stream(CHAT, messages=as_messages(messages), **body).only

    def metrics_text(self) -> tuple[str, float]:
        """The scrape and how many seconds it took."""
        start = time.monotonic()
        response = wire.request(self.port, "GET", "/metrics", headers=self.headers)
        assert response.status == 200, response.body[:300]
        return response.body.decode(), time.monotonic() - start


def as_messages(messages: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def at_once(jobs: Sequence[Callable[[], T]], limit: int | None = None) -> list[T]:
    """Run all jobs on threads (at most `limit` at a time); results in order, the first failure is raised."""
    with ThreadPoolExecutor(max_workers=limit or max(1, len(jobs))) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def assert_error_body(response: wire.RawResponse, *statuses: int) -> dict[str, Any]:
    """An OpenAI error body with one of `statuses`; returns the inner object."""
    shown = response.body.decode("utf-8", "replace")[:600]
    assert response.status in statuses, f"{response.status} instead of {statuses}: {shown}"
    assert response.headers["content-type"].startswith("application/json"), response.headers
    body = response.json()
    assert set(body) == {"error"}, shown
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str), shown
    assert error["message"], shown
    assert isinstance(error["type"], str), shown
    assert "param" in error, shown
    assert "code" in error, shown
    assert "Traceback" not in error["message"], shown
    return error
