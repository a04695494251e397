"""The first conversation after a start: is the service ready, and what does it say.

Owns the questions that `baton serve` puts to its own HTTP address, as any client would. Synchronous; main
thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from core.errors import ServingError

QUESTION = "In one sentence: what is a relay race?"
MAX_TOKENS = 40


def client(api_key: str | None, timeout_s: float) -> httpx.Client:
    """A client of the service; `api_key` None: it asks for none."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return httpx.Client(timeout=timeout_s, trust_env=False, headers=headers)


def wait_until_ready(
    url: str, timeout_s: float, keep_waiting: Callable[[str], None], api_key: str | None = None
) -> str:
    """Poll `/ready` until it answers 200; returns the served model's name. `keep_waiting` is told the latest
    answer and may raise. Raises TimeoutError with that answer when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    answer = "no answer yet"
    with client(api_key, 5.0) as http:
        while time.monotonic() < deadline:
            try:
                response = http.get(f"{url}/ready")
                if response.status_code == httpx.codes.OK:
                    return str(http.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"])
                answer = f"{response.status_code} {response.text[:300]}"
            except httpx.TransportError as error:
                answer = f"{type(error).__name__}: {error}"
            keep_waiting(answer)
            time.sleep(0.2)
    raise TimeoutError(answer)


class _Refused(Exception):
    """The service did not take the question; `param` is the field it names."""

    def __init__(self, response: httpx.Response) -> None:
        self.text = response.read().decode(errors="replace")
        super().__init__(self.text)
        try:
            self.param = json.loads(self.text)["error"]["param"]
        except (ValueError, KeyError, TypeError):
            self.param = None


def stream_sample(url: str, model: str, api_key: str | None = None) -> Iterator[str]:
    """The pieces of one sample completion as they arrive. Raises ServingError in the service's words.

    A model without a chat template is asked to go on with the plain question.
    """
    body = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    chat = {**body, "messages": [{"role": "user", "content": QUESTION}]}
    with client(api_key, 120.0) as http:
        try:
            try:
                yield from _pieces(http, f"{url}/v1/chat/completions", chat)
            except _Refused as refused:
                if refused.param != "messages":
                    raise
                yield from _pieces(http, f"{url}/v1/completions", {**body, "prompt": QUESTION})
        except _Refused as refused:
            raise ServingError(f"the sample was refused: {refused.text}") from refused


def _pieces(http: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[str]:
    with http.stream("POST", url, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise _Refused(response)
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if payload == line or payload == "[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                raise ServingError(f"the sample failed: {event['error'].get('message')}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                if piece:
                    yield piece


def curl_line(url: str, model: str, is_key_needed: bool = False) -> str:
    """What a user can paste to talk to the service, with the key in $BATON_API_KEY where one is needed."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if is_key_needed else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    )
