"""Case 30: the first token is handed over exactly once, and ends the answer when it should."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import profiles
from tests.e2e.answers import Answer
from tests.e2e.checks import assert_same, refused_both
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

PROMPT = "The three states of matter are"


@pytest.fixture(scope="module")
def split(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.fixture(scope="module")
def mono(fleet: Fleet) -> Client:
    return fleet.system(profiles.MONO).client


@pytest.fixture(scope="module")
def whole(mono: Client) -> Answer:
    return mono.complete(PROMPT, max_tokens=17, temperature=0, logprobs=2)


def both(split: Client, mono: Client, **extra: Any) -> list[Answer]:
    """All choices of the split system, after checking that streamed and monolithic ones are the same."""
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, **extra}
    plain = split.answer_all(COMPLETIONS, **body)
    expected = mono.answer_all(COMPLETIONS, **body)
    streamed = split.stream(COMPLETIONS, **body).choices
    for other, name in ((expected, "monolithic"), (streamed, "streamed")):
        assert len(other) == len(plain)
        for one, two in zip(plain, other, strict=True):
            assert_same(one, two, f"{name} {extra}")
        assert other[0].num_tokens == plain[0].num_tokens, name
        assert other[0].num_prompt_tokens == plain[0].num_prompt_tokens == 6, name
    return plain


@pytest.mark.parametrize("is_endless", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_exactly_as_many_tokens_as_asked_for(
    split: Client, mono: Client, whole: Answer, num_tokens: int, is_endless: bool
) -> None:
    (answer,) = both(split, mono, max_tokens=num_tokens, ignore_eos=is_endless, logprobs=2)
    assert answer.num_tokens == num_tokens
    assert answer.tokens == whole.tokens[:num_tokens]
    assert answer.logprobs[0] == pytest.approx(whole.logprobs[0], abs=1e-3)
    assert answer.finish_reason == "length"


def test_an_absent_limit_is_the_documented_default_and_not_zero(split: Client, mono: Client) -> None:
    (answer,) = both(split, mono)
    assert answer.num_tokens == 16


def test_a_limit_of_zero_answers_nothing_or_is_refused(split: Client) -> None:
    response = split.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0, "temperature": 0})
    if response.status == 200:
        assert response.json()["choices"][0]["text"] == ""
        assert response.json()["usage"]["completion_tokens"] == 0
        assert response.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert response.status == 400


def test_min_tokens_is_honoured_across_the_handoff(split: Client, mono: Client, whole: Answer) -> None:
    (answer,) = both(split, mono, min_tokens=5, max_tokens=8)
    assert 5 <= answer.num_tokens <= 8
    refused_both(split, COMPLETIONS, {"prompt": PROMPT, "min_tokens": 9, "max_tokens": 8})
    (answer,) = both(split, mono, min_tokens=3, max_tokens=8, stop=whole.tokens[0])
    assert answer.num_tokens >= 3, "a stop string completed before min_tokens does not end the answer"
    (answer,) = both(split, mono, min_tokens=3, max_tokens=8, logit_bias={"2": 20})
    assert answer.num_tokens >= 3


def test_a_stop_on_the_very_first_token_ends_the_answer(
    split: Client, mono: Client, whole: Answer, fleet: Fleet
) -> None:
    (answer,) = both(split, mono, max_tokens=8, stop=whole.tokens[0])
    assert answer.text == ""
    assert answer.finish_reason == "stop"
    first = fleet.models.vocabulary.id_of_text(whole.tokens[0])
    (answer,) = both(split, mono, max_tokens=8, stop_token_ids=[first])
    assert answer.text == ""
    assert answer.finish_reason == "stop"


def test_an_end_of_sequence_as_first_token_is_an_empty_answer(split: Client, mono: Client) -> None:
    (answer,) = both(split, mono, max_tokens=8, logit_bias={"2": 100})
    assert answer.text == ""
    assert answer.finish_reason == "stop"
    assert answer.num_tokens <= 1
    (answer,) = both(split, mono, max_tokens=8, logit_bias={"2": 100}, min_tokens=4)
    assert answer.num_tokens in (4, 5)
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_three_samples_each_get_their_first_token_once(split: Client, mono: Client) -> None:
    greedy = both(split, mono, n=3, max_tokens=6, logprobs=2)
    assert [answer.text for answer in greedy] == [greedy[0].text] * 3
    assert greedy[0].num_tokens == 18
    seeded = both(split, mono, n=3, max_tokens=6, temperature=1, seed=30)
    assert len({answer.text for answer in seeded}) > 1
    one = both(split, mono, n=3, max_tokens=1, temperature=1, seed=30)
    for first, longer in zip(one, seeded, strict=True):
        assert longer.text.startswith(first.text)
