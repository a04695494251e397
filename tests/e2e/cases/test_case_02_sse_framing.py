"""Case 02: server-sent events are framed as OpenAI frames them, and usage comes exactly when asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import profiles, prompts
from tests.e2e.checks import refused
from tests.e2e.client import CHAT, COMPLETIONS, Client, as_messages
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

HI: dict[str, Any] = {"messages": as_messages("hi"), "max_tokens": 8, "temperature": 0}
TWO: dict[str, Any] = {"prompt": ["A cat", "Two dogs"], "max_tokens": 6, "temperature": 0}
WITHOUT_USAGE = ["absent", None, {}, {"include_usage": False}]


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.mark.parametrize("options", WITHOUT_USAGE)
def test_a_chat_stream_without_include_usage_carries_none(client: Client, options: Any) -> None:
    streamed = client.stream(CHAT, **HI, stream_options=options)
    plain = client.chat("hi", max_tokens=8, temperature=0)
    assert streamed.only.text == plain.text
    assert streamed.only.finish_reason == plain.finish_reason


def test_a_chat_stream_with_include_usage_ends_with_the_usage_of_the_plain_answer(client: Client) -> None:
    streamed = client.stream(CHAT, **HI)
    plain = client.chat("hi", max_tokens=8, temperature=0)
    assert streamed.only.num_prompt_tokens == prompts.HI_CHAT_TOKENS
    assert streamed.only.usage is not None
    assert plain.usage is not None
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.only.usage[key] == plain.usage[key], key


@pytest.mark.parametrize("options", [*WITHOUT_USAGE, {"include_usage": True}])
def test_a_stream_of_two_prompts_interleaves_choices_and_ends_each_once(client: Client, options: Any) -> None:
    streamed = client.stream(COMPLETIONS, **TWO, stream_options=options)
    plain = client.answer_all(COMPLETIONS, **TWO)
    assert [answer.text for answer in streamed.choices] == [answer.text for answer in plain]
    if options == {"include_usage": True}:
        usage = streamed.choices[0].usage
        assert usage is not None
        assert usage["completion_tokens"] == 12
        assert usage["prompt_tokens"] == plain[0].num_prompt_tokens


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_event_is_sent_as_its_own_piece_of_the_body(client: Client, path: str) -> None:
    body = HI if path == CHAT else {**TWO, "prompt": "A cat"}
    response = client.stream(path, **body).response
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert response.headers.get("transfer-encoding") == "chunked"
    assert len(response.arrivals) > 3, "the stream was buffered into one piece"


def test_stream_options_without_streaming_are_refused(client: Client) -> None:
    for extra in ({"stream": False}, {}):
        refused(client, CHAT, {**HI, **extra, "stream_options": {"include_usage": True}})
        refused(client, COMPLETIONS, {**TWO, **extra, "stream_options": {"include_usage": True}})
