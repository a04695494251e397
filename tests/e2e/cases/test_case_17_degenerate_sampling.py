"""Case 17: sampling settings at the edge of their range are well defined."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import profiles
from tests.e2e.answers import Answer
from tests.e2e.checks import assert_same, refused_both
from tests.e2e.client import CHAT, COMPLETIONS, Client, as_messages, at_once
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

ONCE: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": 2}

LIKE_GREEDY: list[dict[str, Any]] = [
    *({"temperature": 0, "top_p": top_p} for top_p in (0, 0.1)),
    *({"temperature": 0, "top_k": top_k} for top_k in (-1, 0, 1, 49152, 1_000_000_000)),
    *({"temperature": 0, "min_p": min_p} for min_p in (0, 1)),
    {"temperature": 1, "top_p": 0},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1e-6},
    {"temperature": 1e-6, "top_p": 0.5, "seed": 3},
]

REFUSED: list[dict[str, Any]] = [
    {"top_p": -0.1},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 1.5},
    {"min_p": -0.1},
    {"temperature": -1},
]


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.fixture(scope="module")
def greedy(client: Client) -> Answer:
    return client.complete(**ONCE, temperature=0)


@pytest.mark.parametrize("settings", LIKE_GREEDY, ids=str)
def test_settings_that_leave_only_the_best_token_give_the_greedy_answer(
    client: Client, greedy: Answer, settings: dict[str, Any]
) -> None:
    assert_same(greedy, client.complete(**ONCE, **settings), str(settings))


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_settings_out_of_range_are_refused(client: Client, settings: dict[str, Any]) -> None:
    refused_both(client, COMPLETIONS, {**ONCE, **settings})
    refused_both(client, CHAT, {"messages": as_messages("hi"), "max_tokens": 4, **settings})


def test_without_any_setting_and_seed_answers_differ(client: Client) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16}
    texts = [answer.text for answer in at_once([lambda: client.complete(**body)] * 10)]
    assert len(set(texts)) >= 2, texts[0]


def test_a_request_without_a_seed_reports_the_one_it_got_and_that_one_repeats_it(client: Client) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 1}
    response = client.post(COMPLETIONS, body)
    assert response.status == 200
    seed = int(response.headers["x-baton-seed"])
    text = response.json()["choices"][0]["text"]
    assert client.complete(**body, seed=seed).text == text
    streamed = client.stream(COMPLETIONS, **body, seed=seed)
    assert streamed.only.text == text
    assert int(streamed.response.headers["x-baton-seed"]) == seed
