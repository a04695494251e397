"""The API as a client sees it: shapes, framing, errors with a body, and counts that add up."""

from __future__ import annotations

from typing import Any

from core.errors import StepFailed
from core.ids import Role
from router.config import DefaultsSetting
from router.served_model import SamplingDefaults
from tests.doubles import settle
from tests.unit.router.api import TOKENIZER, events_of, new_model, serving
from tests.unit.router.model_answers import (
    REMOTE,
    bare_call,
    error_message,
    model_ids,
    model_text,
    two_workers,
)
from tests.unit.router.scripted import ScriptedWorker

# ---------------------------------------------------------------- whole answers


async def test_a_completion_has_openais_shape() -> None:
    async with serving(*two_workers(), **REMOTE) as api:
        response = await api.complete(prompt="stop", max_tokens=5, seed=5)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "toy"
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": model_text(5), "logprobs": None, "finish_reason": "length"}
    num_prompt = len(TOKENIZER.encode_prompt("stop"))
    assert body["usage"].pop("baton")
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_answer_has_openais_shape() -> None:
    async with serving(*two_workers(), **REMOTE) as api:
        body = (await api.chat(max_completion_tokens=5, seed=5)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": model_text(5), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None


async def test_headers_report_seed_request_id_and_workers() -> None:
    async with serving(*two_workers(), **REMOTE) as api:
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
    async with serving(*two_workers()) as api:
        body = (await api.complete(prompt=prompts, n=2, max_tokens=4, seed=7, echo=True)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        for sample in range(2):
            assert body["choices"][number * 2 + sample]["text"] == prompt + model_text(4, 7, sample)
    assert body["usage"]["prompt_tokens"] == sum(len(TOKENIZER.encode_prompt(text)) for text in prompts)
    assert body["usage"]["completion_tokens"] == 24


async def test_prompts_without_a_seed_get_different_ones() -> None:
    async with serving(*two_workers()) as api:
        response = await api.complete(prompt=["the", "the"], max_tokens=8)
    seeds = response.headers["x-baton-seed"].split(",")
    assert len(set(seeds)) == 2


async def test_token_ids_are_a_prompt_and_come_back_where_asked_for() -> None:
    ids = TOKENIZER.encode_prompt("the end")
    async with serving(*two_workers()) as api:
        whole = await api.complete(prompt=ids, max_tokens=4, seed=5, return_token_ids=True, echo=True)
        chat = await api.chat(max_tokens=4, seed=5, return_token_ids=True)
        stream = await api.complete(prompt=[ids], max_tokens=4, seed=5, return_token_ids=True, stream=True)
    (choice,) = whole.json()["choices"]
    assert choice["token_ids"] == model_ids(4)
    assert choice["prompt_token_ids"] == ids
    assert choice["text"] == "the end" + model_text(4)
    assert chat.json()["choices"][0]["token_ids"] == model_ids(4)
    chunks = [event["choices"][0] for event in events_of(stream)[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])] == model_ids(4)
    assert chunks[0]["prompt_token_ids"] == ids


async def test_defaults_are_16_tokens_or_the_rest_of_the_context() -> None:
    async with serving(*two_workers()) as api:
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
    async with serving(*two_workers()) as api:
        body = {"prompt": "the", "max_tokens": 6, "seed": 5, "logprobs": 1}
        whole = (await api.complete(**body)).json()["choices"][0]["logprobs"]
        events = events_of(await api.complete(**body, stream=True))
    labels = [TOKENIZER.bytes.label(token_id) for token_id in model_ids(6)]
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
    async with serving(*two_workers()) as api:
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
    async with serving(*two_workers()) as api:
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
        assert "".join(choice["delta"].get("content", "") for choice in mine) == model_text(6, 5, index)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}


async def test_usage_comes_once_last_and_only_where_asked_for() -> None:
    async with serving(*two_workers()) as api:
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
    assert usage["usage"].pop("baton").keys() == whole.pop("baton").keys()
    assert usage["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_stop_string_never_leaks_and_streaming_equals_the_whole() -> None:
    text = model_text(30)
    stop = text[9:13]
    async with serving(*two_workers(), **REMOTE) as api:
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
        error_message(response, 500, None, "step_failed")


async def test_an_error_after_the_first_token_is_the_last_event_and_no_done_follows() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", break_at={2: StepFailed("boom")})
    worker.on_generate = lambda job: StepFailed("again") if job.attempt > 1 else None
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        events = events_of(await api.complete(prompt="the", seed=5, max_tokens=9, stream=True))
        assert await api.metric("baton_requests_total", outcome="failed", reason="step_failed") == 1
    assert events[-1]["error"]["code"] == "step_failed"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == model_text(2)


async def test_a_first_token_that_takes_long_does_not_hold_the_head_back_for_ever() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=0)
    async with serving(worker, head_hold_s=0) as api:
        task, gone, sent = await bare_call(api, {"stream": True, "max_tokens": 2, "seed": 5})
        await settle()
        assert sent[0]["status"] == 200
        worker.resume.set()
        await task
        assert not gone.is_set()
        assert sent[-2]["body"] == b"data: [DONE]\n\n"
        assert await api.metric("baton_requests_total", outcome="succeeded") == 1
