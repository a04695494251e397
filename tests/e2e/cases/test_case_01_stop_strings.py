"""Case 01: a stop string that spans several tokens never leaks, streamed or not."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from tests.e2e import profiles
from tests.e2e.answers import Answer
from tests.e2e.checks import refused
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

ALPHABET: dict[str, Any] = {
    "prompt": "Here is the English alphabet: ABC",
    "max_tokens": 48,
    "temperature": 0,
}


NEVER = "\u2603 never"


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.fixture(scope="module")
def whole(client: Client) -> Answer:
    """The undisturbed answer; at least 20 tokens that are whole characters."""
    answer = client.complete(**ALPHABET, logprobs=1)
    assert len(answer.tokens) == 48
    assert "".join(answer.tokens) == answer.text
    return answer


def cut(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def check(client: Client, whole: Answer, *wanted: str | list[str]) -> None:
    """For each `stop` both modes give the text before its first occurrence; no piece ever went beyond it."""
    plain = at_once([partial(client.complete, **ALPHABET, stop=stop) for stop in wanted])
    streamed = at_once([partial(client.stream_completion, **ALPHABET, stop=stop) for stop in wanted])
    for stop, *answers in zip(wanted, plain, streamed, strict=True):
        expected = cut(whole.text, [stop] if isinstance(stop, str) else stop)
        for answer in answers:
            assert answer.text == expected, f"stop {stop!r}"
            is_whole = expected == whole.text
            assert answer.finish_reason == (whole.finish_reason if is_whole else "stop"), f"stop {stop!r}"
        for sent in itertools.accumulate(answers[1].pieces):
            assert expected.startswith(sent), f"stop {stop!r}: {sent!r} was sent"


def test_a_stop_across_three_tokens_cuts_before_its_first_occurrence(client: Client, whole: Answer) -> None:
    tokens = whole.tokens
    stops = [tokens[i][-1] + tokens[i + 1] + tokens[i + 2][0] for i in (3, 8, 15)]
    assert all(stop in whole.text for stop in stops)
    check(client, whole, *stops, *([stop, "zzz"] for stop in stops))


def test_the_stop_that_occurs_first_in_the_text_wins_over_the_one_listed_first(
    client: Client, whole: Answer
) -> None:
    late = whole.tokens[12] + whole.tokens[13]
    early = whole.tokens[4] + whole.tokens[5]
    assert whole.text.find(early) < whole.text.find(late)
    check(client, whole, [late, early])


def test_text_held_back_for_a_stop_that_never_completes_is_released(client: Client, whole: Answer) -> None:
    beginnings = [whole.tokens[i] + whole.tokens[i + 1][:1] for i in (2, 9, 46)]
    check(client, whole, *(text + NEVER for text in beginnings), whole.tokens[-1] + NEVER)


def test_a_stop_whose_beginning_occurs_earlier_without_completing_still_stops(
    client: Client, whole: Answer
) -> None:
    later = next(i for i in range(1, len(whole.text) - 4) if whole.text[i] != whole.text[0])
    stop = whole.text[later : later + 4]
    check(client, whole, stop[:1] + NEVER, [stop[:2] + NEVER, stop])


def test_the_first_character_and_the_first_token_are_stops_too(client: Client, whole: Answer) -> None:
    check(client, whole, whole.text[0], whole.tokens[0] + whole.tokens[1])


def test_an_empty_stop_is_ignored_or_refused(client: Client, whole: Answer) -> None:
    response = client.post(COMPLETIONS, {**ALPHABET, "stop": ""})
    if response.status == 200:
        assert response.json()["choices"][0]["text"] == whole.text
    else:
        refused(client, COMPLETIONS, {**ALPHABET, "stop": ""})
    assert client.complete(**ALPHABET, stop=[]).text == whole.text
