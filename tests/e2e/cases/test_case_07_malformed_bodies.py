"""Case 07: nulls count as absent; what cannot be understood is the client's fault, said in an error body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e import profiles, wire
from tests.e2e.checks import BOTH, minimal, refused, refused_both, survives
from tests.e2e.client import CHAT, COMPLETIONS, Client, assert_error_body
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System

pytestmark = pytest.mark.side_by_side


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.SPLIT)


@pytest.fixture(scope="module")
def client(system: System) -> Client:
    return system.client


NULLS = dict.fromkeys(
    [
        *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "user"),
        *("presence_penalty", "frequency_penalty", "stream_options"),
    ]
)


def test_null_fields_of_a_completion_behave_as_absent(client: Client) -> None:
    answer = client.complete("hi", **{**NULLS, "logprobs": None})
    assert answer.num_tokens <= 16, "max_tokens null is the documented default of completions"
    assert answer.num_prompt_tokens == 1


def test_null_fields_of_a_chat_behave_as_absent(client: Client) -> None:
    extra = {**NULLS, "tools": None, "response_format": None, "top_logprobs": None, "max_tokens": 4}
    assert client.chat("hi", **extra).num_tokens <= 4
    del extra["max_tokens"]
    streamed = client.stream_chat(
        "Say hi.", **{**extra, "temperature": 0, "stream_options": {"include_usage": True}}
    )
    assert streamed.finish_reason in ("stop", "length")


RAW_BODIES = {
    "cut off": b'{"model":',
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "a number": b"123",
    "an empty object": b"{}",
    "not UTF-8": b'{"prompt":"\xff\xfe\xc3"}',
    "a bare byte": b"\x80",
    "deeply nested": b"[" * 20_000,
    "deeply nested field": b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "trailing garbage": b'{"prompt":"hi"} x',
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", RAW_BODIES)
def test_a_body_that_is_not_a_json_object_is_refused(client: Client, path: str, name: str) -> None:
    assert_error_body(client.post(path, RAW_BODIES[name]), 400)


WRONG_FIELDS: list[dict[str, Any]] = [
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"top_p": "x"},
    {"n": "two"},
    {"stop": 5},
    {"stop": [1, 2]},
    {"seed": "x"},
    {"logit_bias": [1]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"49152": 1}},
    {"stream": "maybe"},
    {"stream_options": 5},
]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("field", WRONG_FIELDS, ids=str)
def test_a_field_of_the_wrong_type_or_range_is_refused_by_name(
    client: Client, path: str, field: dict[str, Any]
) -> None:
    error = refused(client, path, {**minimal(path), **field})
    (name,) = field
    assert name in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("path", BOTH)
def test_numbers_that_json_does_not_have_are_refused(client: Client, path: str) -> None:
    for literal in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = json.dumps({"model": client.model, **minimal(path)}).encode()
        response = client.post(path, body[:-1] + b',"temperature":' + literal + b"}")
        assert_error_body(response, 400)


def test_messages_that_are_no_list_of_messages_are_refused(client: Client) -> None:
    wrong: list[Any] = [
        *({}, "hi", 5, None, [5], ["hi"], [{}], [{"role": "user"}], [{"content": "hi"}]),
        [{"role": "stranger", "content": "hi"}],
        [{"role": "user", "content": 5}],
    ]
    for messages in wrong:
        refused_both(client, CHAT, {"messages": messages})


@pytest.mark.parametrize("path", BOTH)
def test_an_unknown_model_is_404(client: Client, path: str) -> None:
    for stream in (False, True):
        error = refused(client, path, {**minimal(path), "model": "no-such-model", "stream": stream}, 404)
        assert error["code"] == "model_not_found"
    refused(client, path, {**minimal(path), "model": 5})


@pytest.mark.parametrize("path", BOTH)
def test_an_unknown_field_is_refused_by_name(client: Client, path: str) -> None:
    error = refused(client, path, {**minimal(path), "no_such_field": 1})
    assert "no_such_field" in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("path", BOTH)
def test_the_wrong_method_is_405_and_an_unknown_path_404(client: Client, path: str) -> None:
    assert_error_body(wire.request(client.port, "GET", path), 405)
    assert_error_body(wire.request(client.port, "GET", "/v1/no-such-path"), 404)


@pytest.mark.parametrize("path", BOTH)
def test_a_body_that_never_comes_to_its_end_is_given_up_at_the_deadline(client: Client, path: str) -> None:
    headers = {"Transfer-Encoding": "chunked", "X-Request-Timeout": "1"}
    with wire.RawConnection(client.port, timeout_s=30.0) as connection:
        connection.send("POST", path, headers=headers)
        error = assert_error_body(connection.read_all(), 408)
    assert error["code"] == "request_timeout"


def test_a_storm_of_malformed_bodies_leaves_the_system_as_it_was(system: System) -> None:
    with survives(system):
        for _ in range(5):
            for body in RAW_BODIES.values():
                assert 400 <= system.client.post(COMPLETIONS, body).status < 500
