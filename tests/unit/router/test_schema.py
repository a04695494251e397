"""What a body may be: strict types, nulls are absent, and nothing is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from core.errors import InvalidRequest
from router.chat_schema import ChatBody
from router.completion_schema import CompletionBody
from router.json_body import parse_json
from router.schema import parse

_C: dict[str, Any] = {"model": "m", "prompt": "hi"}
_H: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def _refused(kind: type, body: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, body)
    param = caught.value.details.get("param")
    assert param is None or isinstance(param, str)
    assert param is None or param.split("[")[0].split(".")[0] in caught.value.message
    return param


def test_nulls_mean_absent() -> None:
    fields = set(CompletionBody.model_fields) - {"model", "prompt"}
    assert parse(CompletionBody, {**_C, **dict.fromkeys(fields)}) == parse(CompletionBody, _C)
    fields = set(ChatBody.model_fields) - {"model", "messages"}
    nulls = {**_H, **dict.fromkeys(fields), "tools": None, "response_format": None, "store": None}
    assert parse(ChatBody, nulls) == parse(ChatBody, _H)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 2**31),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 1.5),
        ("n", 0),
        ("n", -1),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", {}),
        ("stream", "yes"),
        ("stream", 1),
        ("logit_bias", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"100": 1, "0100": -1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": True}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", "no"),
        ("user", 5),
        ("model", 5),
        ("unheard_of", 1),
        ("suffix_", "x"),
    ],
)
def test_a_wrong_value_is_refused_by_name_on_both_endpoints(field: str, value: Any) -> None:
    assert _refused(CompletionBody, {**_C, field: value}) == field
    assert _refused(ChatBody, {**_H, field: value}) == field


@pytest.mark.parametrize(
    ("field", "inert", "active"),
    [
        ("tools", [], [{"type": "function"}]),
        ("tool_choice", "none", "required"),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("modalities", ["text"], ["audio"]),
        ("store", False, True),
        ("metadata", {}, {"a": "b"}),
        ("service_tier", "auto", "priority"),
        ("functions", [], [{}]),
        ("parallel_tool_calls", True, 1),
        ("reasoning_effort", None, "high"),
        ("audio", None, {}),
        ("logits_processors", [], ["x"]),
    ],
)
def test_unsupported_fields_pass_only_where_they_ask_for_nothing(field: str, inert: Any, active: Any) -> None:
    assert parse(ChatBody, {**_H, field: inert}) == parse(ChatBody, _H)
    assert _refused(ChatBody, {**_H, field: active}) == field


def test_suffix_and_best_of_pass_only_where_they_ask_for_nothing() -> None:
    assert parse(CompletionBody, {**_C, "suffix": "", "best_of": 1}) == parse(CompletionBody, _C)
    assert parse(CompletionBody, {**_C, "n": 3, "best_of": 3}).n == 3
    assert _refused(CompletionBody, {**_C, "suffix": "end"}) == "suffix"
    for best_of in (2, 0, "1", True):
        assert _refused(CompletionBody, {**_C, "best_of": best_of}) == "best_of"
    assert _refused(CompletionBody, {**_C, "n": 2, "best_of": 1}) == "best_of"


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", [1]], [1.5], [True], {}, 5, [[1], ["a"]]])
def test_a_prompt_of_no_known_kind_is_refused(prompt: Any) -> None:
    assert _refused(CompletionBody, {**_C, "prompt": prompt}) == "prompt"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_come_as_text_or_ids_one_or_many(prompt: Any, found: Any) -> None:
    assert parse(CompletionBody, {**_C, "prompt": prompt}).prompt == found


def test_required_fields_are_named() -> None:
    assert _refused(CompletionBody, {"model": "m"}) == "prompt"
    assert _refused(CompletionBody, {"prompt": "x"}) == "model"
    assert _refused(ChatBody, {"model": "m"}) == "messages"


@pytest.mark.parametrize("body", [[], None, "x", 123, True])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    assert _refused(CompletionBody, body) is None


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": 1, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "odd": 1}, "messages[0].odd"),
        ("hi", "messages[0]"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_its_place(message: Any, param: str) -> None:
    assert _refused(ChatBody, {**_H, "messages": [message]}) == param


def test_tool_calls_in_a_message_are_refused_unless_empty() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}
    assert parse(ChatBody, {**_H, "messages": [message]}).template_messages() == [
        {"role": "assistant", "content": "x"}
    ]
    assert (
        _refused(ChatBody, {**_H, "messages": [{**message, "tool_calls": [{}]}]}) == "messages[0].tool_calls"
    )


def test_empty_messages_are_refused() -> None:
    assert _refused(ChatBody, {**_H, "messages": []}) == "messages"
    assert _refused(ChatBody, {**_H, "messages": {}}) == "messages"


def test_text_parts_are_joined_and_developer_is_the_newer_name_of_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse(ChatBody, {**_H, "messages": [{"role": "developer", "content": parts, "name": "me"}]})
    assert body.template_messages() == [{"role": "system", "content": "a\nb", "name": "me"}]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused_by_name(extra: dict[str, Any], param: str) -> None:
    assert _refused(ChatBody, {**_H, **extra}) == param


def test_continuing_excludes_a_generation_prompt() -> None:
    body = {**_H, "messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True}
    assert parse(ChatBody, body).is_generation_prompt_added is False
    assert _refused(ChatBody, {**body, "add_generation_prompt": True}) == "continue_final_message"


def test_completion_logprobs_are_a_count() -> None:
    assert parse(CompletionBody, {**_C, "logprobs": 0}).logprobs == 0
    assert _refused(CompletionBody, {**_C, "logprobs": True}) == "logprobs"
    assert _refused(CompletionBody, {**_C, "logprobs": -1}) == "logprobs"


def test_values_never_appear_in_a_refusal() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {**_H, "temperature": "my secret"})
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"model":',
        b"\xff\xfe",
        b'"\xc3\x28"',
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e400}',
        b'{"prompt": "\\ud83d"}',
        b"{} {}",
        b"{'a': 1}",
    ],
)
def test_bytes_that_are_no_strict_json_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(data)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, _C | {f"field_{number}": 1 for number in range(500)}, "field_0"),
        (ChatBody, {"model": "m", "messages": [5] * 500}, "messages[0]"),
        (ChatBody, {"model": "m", "messages": [{}] * 500}, "messages[0].role"),
        (
            ChatBody,
            {"model": "m", "messages": [_H["messages"][0] | {f"field_{n}": 1 for n in range(500)}]},
            "messages[0].field_0",
        ),
    ],
)
def test_a_body_that_is_wrong_in_many_places_costs_no_more_than_one_that_is_wrong_in_one(
    kind: type[CompletionBody | ChatBody], body: Any, param: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 2
    assert _refused(kind, body) == param


def test_a_conversation_may_hold_an_answer_as_openai_wrote_it() -> None:
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    said = {"role": "assistant", "content": "hello"}
    whole = {"model": "m", "messages": [*_H["messages"], said | extras, *_H["messages"]]}
    plain = {"model": "m", "messages": [*_H["messages"], said, *_H["messages"]]}
    assert parse(ChatBody, whole) == parse(ChatBody, plain)
