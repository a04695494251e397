"""What the scripted model answers, what an error looks like, and a call that a test can break off."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from core.ids import Role
from router.config import PlanSetting
from tests.unit.router.api import TOKENIZER, Api
from tests.unit.router.scripted import ScriptedWorker, token_at

REMOTE = {"plan": PlanSetting.REMOTE}


def two_workers(**script: Any) -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d", **script)


def model_ids(num_tokens: int, seed: int = 5, sample_index: int = 0) -> list[int]:
    return [token_at(seed, sample_index, position) for position in range(num_tokens)]


def model_text(num_tokens: int, seed: int = 5, sample_index: int = 0) -> str:
    return TOKENIZER.bytes.text(model_ids(num_tokens, seed, sample_index))


def error_message(response: Any, status: int, param: str | None, code: str = "invalid_value") -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert "Traceback" not in body["error"]["message"]
    message: str = body["error"]["message"]
    return message


async def bare_call(
    api: Api, body: dict[str, Any], name: str = "bare"
) -> tuple[asyncio.Task[None], asyncio.Event, list[Any]]:
    """A call on the bare ASGI interface, whose client goes away when the event is set."""
    gone, sent = asyncio.Event(), []
    data = orjson.dumps({"model": "toy", "prompt": "the", **body})
    messages = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", name.encode())],
        "query_string": b"",
    }
    return asyncio.create_task(api.app(scope, receive, send)), gone, sent
