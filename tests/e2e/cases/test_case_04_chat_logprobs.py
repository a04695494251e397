"""Case 04: chat logprobs have OpenAI's schema, streamed and not, special tokens and half characters too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import profiles
from tests.e2e.answers import Answer
from tests.e2e.checks import refused_both
from tests.e2e.client import CHAT, Client, as_messages
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

CAFE: dict[str, Any] = {"messages": as_messages("Say: café 😀"), "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


def entries(client: Client, **extra: Any) -> tuple[list[dict[str, Any]], Answer]:
    """The entries of the plain answer, after checking that the streamed ones are the same."""
    (plain,) = client.answer_all(CHAT, **extra)
    streamed = client.stream(CHAT, **extra).only
    assert streamed.text == plain.text
    content: list[dict[str, Any]] = plain.raw["choices"][0]["logprobs"]["content"]
    assert streamed.tokens == [entry["token"] for entry in content]
    assert streamed.token_bytes == plain.token_bytes
    assert streamed.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert [list(top or {}) for top in streamed.tops] == [list(top or {}) for top in plain.tops]
    return content, plain


def check_entries(content: list[dict[str, Any]], answer: Answer, num_top: int) -> None:
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        top = entry["top_logprobs"]
        assert len(top) == num_top
        values = [candidate["logprob"] for candidate in top]
        assert values == sorted(values, reverse=True)
        for candidate in top:
            assert set(candidate) == {"token", "logprob", "bytes"}
        if top:
            assert top[0]["token"] == entry["token"], "greedy takes the first candidate"
            assert top[0]["logprob"] == entry["logprob"]
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    text = data.decode("utf-8", "replace")
    has_end = answer.finish_reason == "stop" and text != answer.text
    if has_end:
        last = bytes(content[-1]["bytes"]).decode()
        assert text == answer.text + last, "only the end token may be listed without being shown"
    elif answer.finish_reason == "stop":
        assert text == answer.text
    else:
        assert text.startswith(answer.text), f"{text!r} against {answer.text!r}"
        assert set(text.removeprefix(answer.text)) <= {"\ufffd"}
    num_hidden = answer.num_tokens - len(content)
    assert num_hidden in ((0, 1) if answer.finish_reason == "stop" else (0,))


@pytest.mark.parametrize("num_top", [None, 0, 5, 20])
def test_each_token_has_an_entry_with_exactly_the_candidates_asked_for(
    client: Client, num_top: int | None
) -> None:
    extra = {} if num_top is None else {"top_logprobs": num_top}
    content, answer = entries(client, **CAFE, logprobs=True, **extra)
    check_entries(content, answer, num_top or 0)


@pytest.mark.parametrize(
    "extra",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 5},
        {"logprobs": False, "top_logprobs": 5},
    ],
)
def test_candidates_out_of_range_or_without_logprobs_are_refused(
    client: Client, extra: dict[str, Any]
) -> None:
    refused_both(client, CHAT, {**CAFE, **extra})


def test_logprobs_until_the_end_of_sequence_include_special_tokens_among_the_candidates(
    client: Client,
) -> None:
    body = {"messages": as_messages("Say hi."), "max_tokens": 160, "temperature": 0}
    content, answer = entries(client, **body, logprobs=True, top_logprobs=20)
    assert answer.finish_reason == "stop"
    check_entries(content, answer, 20)


def test_entries_of_half_characters_are_not_lost_when_their_text_is_held_back(client: Client) -> None:
    body = {**CAFE, "logit_bias": {"10813": 100}, "max_tokens": 4}
    content, answer = entries(client, **body, logprobs=True)
    assert [bytes(entry["bytes"]) for entry in content] == [b"\xf0\x9f"] * 4
    assert answer.num_tokens == 4


def test_logprobs_are_absent_unless_asked_for(client: Client) -> None:
    for extra in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        (plain,) = client.answer_all(CHAT, **CAFE, **extra)
        assert plain.raw["choices"][0].get("logprobs") is None
