"""The API as a client sees it: shapes, framing, errors with a body, and counts that add up."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.errors import Overloaded, ServingError, StepFailed
from core.ids import Role
from router.config import DefaultsSetting, PlanSetting
from router.served_model import SamplingDefaults
from tests.doubles import settle
from tests.unit.router.api import TOKENIZER, Api, events_of, new_model, serving
from tests.unit.router.scripted import ScriptedWorker, new_status, token_at

REMOTE = {"plan": PlanSetting.REMOTE}


def _pair(**script: Any) -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d", **script)


def _ids(num_tokens: int, seed: int = 5, sample_index: int = 0) -> list[int]:
    return [token_at(seed, sample_index, position) for position in range(num_tokens)]


def _text(num_tokens: int, seed: int = 5, sample_index: int = 0) -> str:
    return TOKENIZER.bytes.text(_ids(num_tokens, seed, sample_index))


def _error(response: Any, status: int, param: str | None, code: str = "invalid_value") -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert "Traceback" not in body["error"]["message"]
    message: str = body["error"]["message"]
    return message


# ---------------------------------------------------------------- whole answers


async def test_a_completion_has_openais_shape() -> None:
    async with serving(*_pair(), **REMOTE) as api:
        response = await api.complete(prompt="stop", max_tokens=5, seed=5)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "toy"
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": _text(5), "logprobs": None, "finish_reason": "length"}
    num_prompt = len(TOKENIZER.encode_prompt("stop"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_answer_has_openais_shape() -> None:
    async with serving(*_pair(), **REMOTE) as api:
        body = (await api.chat(max_completion_tokens=5, seed=5)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": _text(5), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None


async def test_headers_report_seed_request_id_and_workers() -> None:
    async with serving(*_pair(), **REMOTE) as api:
        response = await api.post(
            "/v1/completions", {"X-Request-Id": "mine-1"}, prompt="stop", max_tokens=3, seed=5
        )
        unseeded = await api.complete(prompt="stop", max_tokens=3)
        seed = int(unseeded.headers["x-baton-seed"])
        again = await api.complete(prompt="stop", max_tokens=3, seed=seed)
        odd = await api.post("/v1/completions", {"X-Request-Id": "a b"}, prompt="stop", max_tokens=1)
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-baton-seed"] == "5"
    assert response.headers["x-baton-plan"] == "remote"
    assert response.headers["x-baton-prefill-worker"] == "p"
    assert response.headers["x-baton-decode-worker"] == "d"
    assert again.json()["choices"] == unseeded.json()["choices"]
    assert odd.headers["x-request-id"] == odd.json()["id"]


async def test_several_prompts_and_samples_are_ordered_by_prompt_then_sample() -> None:
    prompts = ["the", "stop it", "end"]
    async with serving(*_pair()) as api:
        body = (await api.complete(prompt=prompts, n=2, max_tokens=4, seed=7, echo=True)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        for sample in range(2):
            assert body["choices"][number * 2 + sample]["text"] == prompt + _text(4, 7, sample)
    assert body["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode_prompt(text)) for text in prompts)
    assert body["usage"]["completion_tokens"] == 24


async def test_prompts_without_a_seed_get_different_ones() -> None:
    async with serving(*_pair()) as api:
        response = await api.complete(prompt=["the", "the"], max_tokens=8)
    seeds = response.headers["x-baton-seed"].split(",")
    assert len(set(seeds)) == 2


async def test_token_ids_are_a_prompt_and_come_back_where_asked_for() -> None:
    ids = TOKENIZER.encode_prompt("the end")
    async with serving(*_pair()) as api:
        whole = await api.complete(prompt=ids, max_tokens=4, seed=5, return_token_ids=True, echo=True)
        chat = await api.chat(max_tokens=4, seed=5, return_token_ids=True)
        stream = await api.complete(prompt=[ids], max_tokens=4, seed=5, return_token_ids=True, stream=True)
    (choice,) = whole.json()["choices"]
    assert choice["token_ids"] == _ids(4)
    assert choice["prompt_token_ids"] == ids
    assert choice["text"] == "the end" + _text(4)
    assert chat.json()["choices"][0]["token_ids"] == _ids(4)
    chunks = [event["choices"][0] for event in events_of(stream)[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == _ids(4)
    assert chunks[0]["prompt_token_ids"] == ids


async def test_defaults_are_16_tokens_or_the_rest_of_the_context() -> None:
    async with serving(*_pair()) as api:
        completion = (await api.complete(prompt="the")).json()
        chat = (await api.chat()).json()
    assert completion["usage"]["completion_tokens"] == 16
    assert chat["usage"]["total_tokens"] == 512


async def test_sampling_defaults_are_the_models_unless_the_client_or_the_operator_says_otherwise() -> None:
    model = new_model(defaults=SamplingDefaults(temperature=0.6, top_k=20))
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker, model=model) as api:
        await api.complete(prompt="the")
        await api.complete(prompt="the", temperature=1, top_k=-1)
    async with serving(worker, model=model, sampling_defaults=DefaultsSetting.OPENAI) as api:
        await api.complete(prompt="the")
    found = [(job.request.sampling.temperature, job.request.sampling.top_k) for job in worker.generates]
    assert found == [(0.6, 20), (1.0, 0), (1.0, 0)]


async def test_every_sampling_field_reaches_the_workers() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    fields = {
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -9,
    }
    async with serving(worker) as api:
        await api.complete(
            prompt="the", max_tokens=9, logit_bias={"7": -1, "3": 2}, stop_token_ids=[8], logprobs=2, **fields
        )
    sampling = worker.generates[0].request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == ((3, 2.0), (7, -1.0))
    assert sampling.stop_token_ids == (8,)
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (9, 2, None)
    assert worker.generates[0].request.is_prefix_cache_read


# ---------------------------------------------------------------- logprobs


async def test_completion_logprobs_are_parallel_lists_and_streaming_gives_the_same() -> None:
    async with serving(*_pair()) as api:
        body = {"prompt": "the", "max_tokens": 6, "seed": 5, "logprobs": 1}
        whole = (await api.complete(**body)).json()["choices"][0]["logprobs"]
        events = events_of(await api.complete(**body, stream=True))
    labels = [TOKENIZER.bytes.label(token_id) for token_id in _ids(6)]
    assert whole["tokens"] == labels
    assert whole["token_logprobs"] == [-0.25] * 6
    assert whole["top_logprobs"] == [{label: -0.25} for label in labels]
    assert whole["text_offset"][0] == 0
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for event in events[:-1]:
        for key, values in (event["choices"][0]["logprobs"] or {}).items():
            joined[key] += values
    assert joined == whole


async def test_scoring_returns_the_prompt_with_its_logprobs_and_generates_nothing() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker) as api:
        whole = (await api.complete(prompt="the end 😀", max_tokens=0, echo=True, logprobs=1)).json()
        stream = await api.complete(prompt="the end 😀", max_tokens=0, echo=True, logprobs=1, stream=True)
    ids = TOKENIZER.encode_prompt("the end 😀")
    (choice,) = whole["choices"]
    assert choice["text"] == "the end 😀"
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    lists = choice["logprobs"]
    assert lists["tokens"] == [TOKENIZER.bytes.label(token_id) for token_id in ids]
    assert lists["token_logprobs"] == [None, *[-1.0] * (len(ids) - 1)]
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][1] == len(TOKENIZER.bytes.text(ids[:1]))
    assert not worker.generates[0].request.is_prefix_cache_read
    chunks = [event["choices"][0] for event in events_of(stream)[:-1]]
    assert chunks[0]["text"] == "the end 😀"
    assert chunks[0]["logprobs"] == lists
    assert [chunk["finish_reason"] for chunk in chunks] == [None, "length"]


async def test_chat_logprobs_have_bytes_and_exactly_the_asked_number_of_candidates() -> None:
    async with serving(*_pair()) as api:
        plain = (await api.chat(max_tokens=6, seed=5, logprobs=True)).json()["choices"][0]
        one = (await api.chat(max_tokens=6, seed=5, logprobs=True, top_logprobs=1)).json()["choices"][0]
        events = events_of(
            await api.chat(max_tokens=6, seed=5, logprobs=True, top_logprobs=1, stream=True, stop="\x00no")
        )
    content = one["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain["logprobs"]["content"])
    assert all(len(entry["top_logprobs"]) == 1 for entry in content)
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    assert data.decode("utf-8", "replace") == one["message"]["content"]
    streamed = [
        entry
        for event in events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


# ---------------------------------------------------------------- streams


async def test_a_chat_stream_is_framed_as_openai_does() -> None:
    async with serving(*_pair()) as api:
        events = events_of(await api.chat(max_tokens=6, seed=5, n=2, stream=True))
    assert events[-1] is None
    chunks = events[:-1]
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "toy", "chat.completion.chunk")
    }
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == _text(6, 5, index)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}


async def test_usage_comes_once_last_and_only_where_asked_for() -> None:
    async with serving(*_pair()) as api:
        whole = (await api.chat(max_tokens=4, seed=5)).json()["usage"]
        asked = events_of(
            await api.chat(max_tokens=4, seed=5, stream=True, stream_options={"include_usage": True})
        )
        for options in ({}, {"include_usage": False}):
            events = events_of(await api.chat(max_tokens=4, stream=True, stream_options=options))
            assert all("usage" not in event for event in events[:-1])
    *chunks, usage, done = asked
    assert done is None
    assert usage["choices"] == []
    assert usage["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_stop_string_never_leaks_and_streaming_equals_the_whole() -> None:
    text = _text(30)
    stop = text[9:13]
    async with serving(*_pair(), **REMOTE) as api:
        body = {"prompt": "the", "max_tokens": 30, "seed": 5, "stop": [stop, "\x00"]}
        whole = (await api.complete(**body)).json()["choices"][0]
        events = events_of(await api.complete(**body, stream=True))
    assert whole["text"] == text[: text.index(stop)]
    assert whole["finish_reason"] == "stop"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["text"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_an_error_before_the_first_token_has_a_status_even_for_a_stream() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", on_generate=lambda job: StepFailed("boom"))
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        response = await api.complete(prompt="the", stream=True)
        _error(response, 500, None, "step_failed")


async def test_an_error_after_the_first_token_is_the_last_event_and_no_done_follows() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", break_at={2: StepFailed("boom")})
    worker.on_generate = lambda job: StepFailed("again") if job.attempt > 1 else None
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        events = events_of(await api.complete(prompt="the", seed=5, max_tokens=9, stream=True))
        assert await api.metric("baton_requests_total", outcome="failed", reason="step_failed") == 1
    assert events[-1]["error"]["code"] == "step_failed"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == _text(2)


async def test_a_first_token_that_takes_long_does_not_hold_the_head_back_for_ever() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=0)
    async with serving(worker, head_hold_s=0) as api:
        task, gone, sent = await _raw(api, {"stream": True, "max_tokens": 2, "seed": 5})
        await settle()
        assert sent[0]["status"] == 200
        worker.resume.set()
        await task
        assert not gone.is_set()
        assert sent[-2]["body"] == b"data: [DONE]\n\n"
        assert await api.metric("baton_requests_total", outcome="succeeded") == 1


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
    async with serving(*_pair(), max_body_bytes=4000 if status == 413 else 1 << 20) as api:
        response = await api.http.post(path, content=data)
        body = response.json()["error"]
        assert (response.status_code, body["code"]) == (status, code)
        assert (await api.complete(prompt="the", max_tokens=1)).status_code == 200


async def test_unknown_paths_and_methods_have_an_error_body_too() -> None:
    async with serving(*_pair()) as api:
        _error(await api.http.get("/v1/nothing"), 404, None, "invalid_request_error")
        _error(await api.http.post("/v1/completions/"), 404, None, "invalid_request_error")
        refused = await api.http.get("/v1/completions")
        _error(refused, 405, None, "invalid_request_error")
        assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["the", ""]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
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
            assert param in _error(response, 400, param)
    assert not worker.generates


async def test_a_prompt_over_the_context_is_refused_with_the_true_numbers() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker) as api:
        for stream in (False, True):
            fits = await api.complete(prompt=[50] * 511, max_tokens=1, stream=stream)
            assert fits.status_code == 200
            full = await api.complete(prompt=[50] * 512, max_tokens=1, stream=stream)
            assert "513" in _error(full, 400, "prompt", "context_length_exceeded")
            over = await api.complete(prompt=[50] * 400, max_tokens=200, stream=stream)
            message = _error(over, 400, "max_tokens", "context_length_exceeded")
            assert "512" in message
            assert "600" in message
            absent = await api.complete(prompt=[50] * 513, stream=stream)
            assert "513" in _error(absent, 400, "prompt", "context_length_exceeded")
        score = await api.complete(prompt=[50] * 512, max_tokens=0)
        assert score.status_code == 200


async def test_a_text_far_over_the_context_is_refused_without_reading_all_of_it() -> None:
    async with serving(*_pair()) as api:
        response = await api.complete(prompt="the end " * 100_000)
        assert "at least" in _error(response, 400, "prompt", "context_length_exceeded")


async def test_what_a_large_body_means_is_the_same_as_for_a_small_one() -> None:
    long = {"user": "u" * 20_000}
    async with serving(*_pair()) as api:
        small = await api.complete(prompt="the end", max_tokens=4, seed=5)
        large = await api.complete(prompt="the end", max_tokens=4, seed=5, **long)
        assert large.json()["choices"] == small.json()["choices"]
        _error(await api.complete(prompt="the end", max_tokens="4", **long), 400, "max_tokens")
        chat = await api.chat(max_tokens=4, seed=5, **long)
        assert chat.json()["choices"][0]["message"]["content"] == _text(4)


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
    async with serving(*_pair()) as api:
        await api.app(scope, receive, send)
        assert sent[0]["status"] == 408
        assert (b"connection", b"close") in sent[0]["headers"]
        assert orjson.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
        assert await api.metric("baton_requests_total", outcome="rejected", reason="request_timeout") == 1


async def test_an_answer_must_fit_the_pool_of_a_decode_worker() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    worker.status = new_status(worker.ref, num_blocks=20)
    async with serving(worker) as api:
        _error(
            await api.complete(prompt=[50] * 60, max_tokens=30), 400, "max_tokens", "context_length_exceeded"
        )
        chat = (await api.chat()).json()
    assert chat["usage"]["total_tokens"] == 80


async def test_without_a_template_chat_says_so_and_completions_work() -> None:
    async with serving(*_pair(), model=new_model(has_template=False)) as api:
        assert "chat template" in _error(await api.chat(), 400, "messages")
        assert (await api.complete(prompt="the")).status_code == 200


async def test_a_client_may_set_its_deadline_within_limits() -> None:
    async with serving(ScriptedWorker(Role.DECODE, "d", pause_at=1), max_timeout_s=400) as api:
        for text in ("0", "-1", "soon", "nan", "inf", "401", "1_0", "", "."):
            refused = await api.post("/v1/completions", {"X-Request-Timeout": text}, prompt="the")
            _error(refused, 400, "X-Request-Timeout")
        late = await api.post("/v1/completions", {"X-Request-Timeout": "0.05"}, prompt="the")
        _error(late, 504, None, "deadline_exceeded")


async def test_without_workers_requests_wait_and_then_hear_when_to_come_back() -> None:
    async with serving(worker_wait_s=0.02) as api:
        response = await api.complete(prompt="the")
        _error(response, 503, None, "no_worker_available")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_full_line_is_refused_at_once_and_the_next_in_line_follows() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=1)
    async with serving(worker, max_concurrency=1, max_queue=1) as api:
        tasks = [asyncio.create_task(api.complete(prompt="the", max_tokens=2)) for _ in range(2)]
        await settle()
        response = await api.complete(prompt="the", max_tokens=2)
        _error(response, 429, None, "overloaded")
        assert response.headers["retry-after"]
        worker.resume.set()
        assert [task.status_code for task in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_workers_refusal_reaches_the_client_as_its_status() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", on_generate=lambda job: Overloaded("full"))
    async with serving(worker, default_timeout_s=2.0, refusal_backoff_s=0.01) as api:
        _error(await api.complete(prompt="the"), 429, None, "overloaded")


async def test_a_fault_of_ours_is_told_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    def broken(job: object) -> ServingError | None:
        raise RuntimeError("secret inside")

    async with serving(ScriptedWorker(Role.DECODE, "d", on_generate=broken)) as api:
        response = await api.complete(prompt="the")
        message = _error(response, 500, None, "internal_error")
        assert "secret" not in message
    assert "secret inside" in caplog.text


# ---------------------------------------------------------------- going away


async def _raw(api: Api, body: dict[str, Any]) -> tuple[asyncio.Task[None], asyncio.Event, list[Any]]:
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
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    return asyncio.create_task(api.app(scope, receive, send)), gone, sent


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_stops_all_its_work_at_once(stream: bool, n: int) -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=2)
    async with serving(worker) as api:
        task, gone, sent = await _raw(api, {"stream": stream, "n": n, "max_tokens": 9})
        await settle()
        assert worker.num_open_calls == 1
        assert bool(sent) is stream
        gone.set()
        await task
        await settle()
        assert worker.num_open_calls == 0
        assert len(worker.cancels) == 1
        assert await api.metric("baton_requests_total", outcome="aborted", reason="cancelled") == 1
        assert await api.metric("baton_router_requests", state="running") == 0


async def test_a_client_that_goes_away_while_waiting_for_its_turn_leaves_the_line() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=1)
    async with serving(worker, max_concurrency=1) as api:
        first = asyncio.create_task(api.complete(prompt="the", max_tokens=2))
        await settle()
        task, gone, _ = await _raw(api, {})
        await settle()
        assert await api.metric("baton_router_requests", state="waiting") == 1
        gone.set()
        await task
        assert await api.metric("baton_router_requests", state="waiting") == 0
        worker.resume.set()
        assert (await first).status_code == 200
        assert len(worker.generates) == 1


async def test_a_server_that_takes_the_call_away_stops_its_work_too() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=2)
    async with serving(worker) as api:
        task, _, _ = await _raw(api, {"stream": True})
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert worker.num_open_calls == 0
        assert len(worker.cancels) == 1


# ---------------------------------------------------------------- pages


async def test_the_served_model_is_listed_and_no_other_is_known() -> None:
    async with serving() as api:
        listed = (await api.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["toy"]
        assert (await api.http.get("/v1/models/toy")).json() == listed["data"][0]
        _error(await api.http.get("/v1/models/a/b"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("roles", "status", "degraded"),
    [
        ([], 503, ["prefill", "decode"]),
        ([Role.PREFILL], 503, ["decode"]),
        ([Role.DECODE], 200, ["prefill"]),
        ([Role.PREFILL, Role.DECODE], 200, []),
    ],
)
async def test_ready_names_what_is_missing_and_health_is_the_routers_own(
    roles: list[Role], status: int, degraded: list[str]
) -> None:
    async with serving(*(ScriptedWorker(role, role.value) for role in roles)) as api:
        response = await api.http.get("/ready")
        assert (response.status_code, response.json()["degraded"]) == (status, degraded)
        assert (await api.http.get("/health")).status_code == 200


async def test_one_scrape_covers_the_router_and_all_workers() -> None:
    prefill, decode = _pair()
    prefill.exposition = decode.exposition = b"# HELP x Text.\n# TYPE x gauge\nx 1\n"
    async with serving(prefill, decode, **REMOTE) as api:
        await api.complete(prompt="the", max_tokens=4)
        response = await api.http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert {sample.labels["worker_id"] for sample in families["x"].samples} == {"p", "d"}
        assert await api.metric("baton_ttft_seconds_count", endpoint="completions", model="toy") == 1
        assert await api.metric("baton_itl_seconds_count") == 3
        assert await api.metric("baton_e2e_seconds_count") == 1
        assert await api.metric("baton_placements_total", plan="remote") == 1
        assert await api.metric("baton_workers", role="decode", state="alive") == 1


async def test_what_was_started_is_what_ended_whatever_happened() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        await api.complete(prompt="the")
        await api.complete(prompt="the", stream=True)
        await api.complete(prompt="the", foo=1)
        await api.complete(prompt="the", model="no-such-model")
        await api.http.post("/v1/chat/completions", content=b"{")
        worker.on_generate = lambda job: StepFailed("boom")
        await api.complete(prompt="the")
        worker.on_generate, worker.pause_at = None, 1
        task, gone, _ = await _raw(api, {})
        await settle()
        gone.set()
        await task
        totals = {
            outcome: await api.metric("baton_requests_total", outcome=outcome)
            for outcome in ("succeeded", "failed", "aborted", "rejected")
        }
        assert totals == {"succeeded": 2, "failed": 1, "aborted": 1, "rejected": 3}
        assert await api.metric("baton_requests_started_total") == 7


async def test_nothing_that_a_client_sends_becomes_a_series() -> None:
    async with serving(*_pair()) as api:
        await api.complete(prompt="the", model="known-not")
        await api.http.get("/v1/warm-up")

        async def count() -> int:
            return len((await api.http.get("/metrics")).text.splitlines())

        before = await count()
        for number in range(30):
            name = f"x{number}\n\"'{{}}"
            await api.post("/v1/completions", {"X-Request-Id": f"id-{number}"}, model=name, user=name)
            await api.http.get(f"/v1/xyz{number}")
            await api.http.request("BREW", f"/pot/{number}")
        assert await count() - before <= 4
