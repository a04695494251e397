"""What the API refuses: with a status, a body, and the name of what is wrong."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson
import pytest

from core.errors import Overloaded, ServingError, WorkerLost
from core.ids import Role
from tests.doubles import settle
from tests.unit.router.api import new_model, serving
from tests.unit.router.model_answers import (
    error_message,
    model_text,
    two_workers,
)
from tests.unit.router.scripted import ScriptedWorker, new_status

# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("/v1/completions", b'{"model":', 400, "invalid_value"),
        ("/v1/completions", b"", 400, "invalid_value"),
        ("/v1/chat/completions", b"[]", 400, "invalid_value"),
        ("/v1/chat/completions", b"null", 400, "invalid_value"),
        ("/v1/completions", b"\xff", 400, "invalid_value"),
        ("/v1/completions", b"[" * 20_000, 400, "invalid_value"),
        ("/v1/completions", b'{"model":"toy","prompt":"x","temperature":NaN}', 400, "invalid_value"),
        ("/v1/completions", b'{"model":"other","prompt":"x"}', 404, "model_not_found"),
        ("/v1/completions", b'{"model":"other"}', 404, "model_not_found"),
        ("/v1/completions", b"x" * 5000, 413, "request_too_large"),
    ],
)
async def test_bytes_that_mean_nothing_are_refused_with_a_body(
    path: str, data: bytes, status: int, code: str
) -> None:
    async with serving(*two_workers(), max_body_bytes=4000 if status == 413 else 1 << 20) as api:
        response = await api.http.post(path, content=data)
        body = response.json()["error"]
        assert (response.status_code, body["code"]) == (status, code)
        assert (await api.complete(prompt="the", max_tokens=1)).status_code == 200


async def test_unknown_paths_and_methods_have_an_error_body_too() -> None:
    async with serving(*two_workers()) as api:
        error_message(await api.http.get("/v1/nothing"), 404, None, "invalid_request_error")
        error_message(await api.http.post("/v1/completions/"), 404, None, "invalid_request_error")
        refused = await api.http.get("/v1/completions")
        error_message(refused, 405, None, "invalid_request_error")
        assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["the", ""]}, "prompt[1]"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [[1], [2], [999]]}, "prompt[2]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"n": 5}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"logit_bias": {"400": 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"foo": 1}, "foo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_exceeds_a_limit_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker, max_prompts=8, max_n=4, max_stop_strings=4) as api:
        for stream in (False, True):
            if stream and param == "stream_options":
                continue
            response = await api.complete(**{"prompt": "the", "stream": stream, **fields})
            assert param in error_message(response, 400, param)
    assert not worker.generates


async def test_a_prompt_over_the_context_is_refused_with_the_true_numbers() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker) as api:
        for stream in (False, True):
            fits = await api.complete(prompt=[50] * 511, max_tokens=1, stream=stream)
            assert fits.status_code == 200
            full = await api.complete(prompt=[50] * 512, max_tokens=1, stream=stream)
            assert "513" in error_message(full, 400, "prompt", "context_length_exceeded")
            over = await api.complete(prompt=[50] * 400, max_tokens=200, stream=stream)
            message = error_message(over, 400, "max_tokens", "context_length_exceeded")
            assert "512" in message
            assert "600" in message
            absent = await api.complete(prompt=[50] * 513, stream=stream)
            assert "513" in error_message(absent, 400, "prompt", "context_length_exceeded")
        score = await api.complete(prompt=[50] * 512, max_tokens=0)
        assert score.status_code == 200


async def test_a_text_far_over_the_context_is_refused_without_reading_all_of_it() -> None:
    async with serving(*two_workers()) as api:
        response = await api.complete(prompt="the end " * 100_000)
        assert "at least" in error_message(response, 400, "prompt", "context_length_exceeded")


async def test_what_a_large_body_means_is_the_same_as_for_a_small_one() -> None:
    long = {"user": "u" * 20_000}
    async with serving(*two_workers()) as api:
        small = await api.complete(prompt="the end", max_tokens=4, seed=5)
        large = await api.complete(prompt="the end", max_tokens=4, seed=5, **long)
        assert large.json()["choices"] == small.json()["choices"]
        error_message(await api.complete(prompt="the end", max_tokens="4", **long), 400, "max_tokens")
        chat = await api.chat(max_tokens=4, seed=5, **long)
        assert chat.json()["choices"][0]["message"]["content"] == model_text(4)


async def test_a_body_that_does_not_come_to_its_end_is_given_up_at_the_deadline() -> None:
    sent: list[Any] = []
    messages = iter([{"type": "http.request", "body": b'{"model":', "more_body": True}])

    async def receive() -> Any:
        for message in messages:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"x-request-timeout", b"0.05")],
        "query_string": b"",
    }
    async with serving(*two_workers()) as api:
        await api.app(scope, receive, send)
        assert sent[0]["status"] == 408
        assert (b"connection", b"close") in sent[0]["headers"]
        assert orjson.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
        assert await api.metric("baton_requests_total", outcome="rejected", reason="request_timeout") == 1


async def test_an_answer_must_fit_the_pool_of_a_decode_worker() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    worker.status = new_status(worker.ref, num_blocks=20)
    async with serving(worker) as api:
        error_message(
            await api.complete(prompt=[50] * 60, max_tokens=30), 400, "max_tokens", "context_length_exceeded"
        )
        chat = (await api.chat()).json()
    assert chat["usage"]["total_tokens"] == 80


async def test_without_a_template_chat_says_so_and_completions_work() -> None:
    async with serving(*two_workers(), model=new_model(has_template=False)) as api:
        assert "chat template" in error_message(await api.chat(), 400, "messages")
        assert (await api.complete(prompt="the")).status_code == 200


async def test_a_client_may_set_its_deadline_within_limits() -> None:
    async with serving(ScriptedWorker(Role.DECODE, "d", pause_at=1), max_timeout_s=400) as api:
        for text in ("0", "-1", "soon", "nan", "inf", "401", "1_0", "", "."):
            refused = await api.post("/v1/completions", {"X-Request-Timeout": text}, prompt="the")
            error_message(refused, 400, "X-Request-Timeout")
        late = await api.post("/v1/completions", {"X-Request-Timeout": "0.05"}, prompt="the")
        error_message(late, 504, None, "deadline_exceeded")


@pytest.mark.parametrize("path", ["/v1/completions", "/debug/route"])
@pytest.mark.parametrize("name", ["X-Request-Timeout", "X-Priority"])
async def test_a_header_that_may_stand_once_is_refused_by_name_if_it_stands_twice(
    path: str, name: str
) -> None:
    body = orjson.dumps({"model": "toy", "prompt": "the", "max_tokens": 1})
    async with serving(*two_workers()) as api:
        twice = await api.http.post(path, content=body, headers=[(name, "5"), (name, "7")])
        error_message(twice, 400, name)


async def test_of_two_request_ids_neither_is_taken_for_the_id() -> None:
    body = orjson.dumps({"model": "toy", "prompt": "the", "max_tokens": 1})
    async with serving(*two_workers()) as api:
        ids = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
        answer = await api.http.post("/v1/completions", content=body, headers=ids)
        assert answer.headers["x-request-id"] == answer.json()["id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/debug/route", "/admin/role", "/admin/drain"])
async def test_a_compressed_body_is_refused_as_such(path: str) -> None:
    body = gzip.compress(orjson.dumps({"model": "toy", "prompt": "the", "max_tokens": 1}))
    async with serving(*two_workers()) as api:
        refused = await api.http.post(path, content=body, headers={"Content-Encoding": "gzip"})
        assert "gzip" in error_message(refused, 415, "Content-Encoding", "unsupported_encoding")
        plain = await api.post("/v1/completions", {"Content-Encoding": "identity"}, prompt="the")
        assert plain.status_code == 200


async def test_without_workers_requests_wait_and_then_hear_when_to_come_back() -> None:
    async with serving(worker_wait_s=0.02) as api:
        response = await api.complete(prompt="the")
        error_message(response, 503, None, "no_worker_available")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_full_line_is_refused_at_once_and_the_next_in_line_follows() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=1)
    async with serving(worker, max_concurrency=1, max_queue=1) as api:
        tasks = [asyncio.create_task(api.complete(prompt="the", max_tokens=2)) for _ in range(2)]
        await settle()
        response = await api.complete(prompt="the", max_tokens=2)
        error_message(response, 429, None, "overloaded")
        assert response.headers["retry-after"]
        worker.resume.set()
        assert [task.status_code for task in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_workers_refusal_reaches_the_client_as_its_status() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", on_generate=lambda job: Overloaded("full"))
    async with serving(worker, default_timeout_s=2.0, refusal_backoff_s=0.01) as api:
        error_message(await api.complete(prompt="the"), 429, None, "overloaded")


async def test_a_fault_of_ours_is_told_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    def broken(job: object) -> ServingError | None:
        raise RuntimeError("secret inside")

    async with serving(ScriptedWorker(Role.DECODE, "d", on_generate=broken)) as api:
        response = await api.complete(prompt="the")
        message = error_message(response, 500, None, "internal_error")
        assert "secret" not in message
    assert "secret inside" in caplog.text


async def test_whatever_makes_nobody_able_to_answer_says_when_to_try_again() -> None:
    lost = ScriptedWorker(Role.DECODE, "d", on_generate=lambda job: WorkerLost("it has died"))
    async with serving(lost, default_timeout_s=2.0, max_failures=1, max_backoff_s=0.01) as api:
        response = await api.complete(prompt="the")
        error_message(response, 503, None, "worker_lost")
        assert int(response.headers["retry-after"]) >= 1
