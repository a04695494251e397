"""Case 20: reported logprobs are those of the model, whatever the sampling settings, and legal JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.reference import TOLERANCE, Floats
from tests.e2e.vocabulary import Vocabulary
from tests.e2e.wire import strict_json

pytestmark = pytest.mark.side_by_side

CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.fixture(scope="module")
def exact(fleet: Fleet) -> Floats:
    """The reference's log-softmax after the prompt."""
    bundled = fleet.models.bundled
    return fleet.models.reference(bundled).next_logprobs(list(prompts.FACTS[CAPITAL]))


def ask(client: Client, **extra: Any) -> Answer:
    """One token with its candidates, parsed strictly."""
    response = client.post(COMPLETIONS, {"prompt": CAPITAL, "max_tokens": 1, **extra})
    assert response.status == 200, response.body
    strict_json(response.body)
    return client.complete(CAPITAL, max_tokens=1, seed=4, skip_special_tokens=False, **extra)


def check_values(answer: Answer, exact: Floats, vocabulary: Vocabulary, num_top: int) -> None:
    """The best `num_top` candidates with their true values, and the chosen token even outside of them."""
    (token,), (logprob,), (top,) = answer.tokens, answer.logprobs, answer.tops
    assert logprob is not None
    assert top is not None
    assert abs(logprob - exact[vocabulary.id_of_text(token)]) <= TOLERANCE
    order = np.argsort(-exact, kind="stable")[: num_top + 1]
    best = {int(token_id) for token_id in order[:num_top]}
    reported = {vocabulary.id_of_text(text): value for text, value in top.items()}
    is_clear = exact[order[num_top - 1]] - exact[order[num_top]] > TOLERANCE
    assert best <= set(reported) or not is_clear
    assert set(reported) - best <= {vocabulary.id_of_text(token)}, "only the chosen token may be added"
    for token_id, value in reported.items():
        assert abs(value - exact[token_id]) <= TOLERANCE
        assert math.isfinite(value)
        assert value <= 0
    assert sum(math.exp(value) for value in top.values()) <= 1.0001


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
@pytest.mark.parametrize("settings", [{"top_k": -1}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}], ids=str)
def test_values_do_not_move_with_sampling_settings(
    client: Client, exact: Floats, vocabulary: Vocabulary, temperature: float, settings: dict[str, Any]
) -> None:
    answer = ask(client, logprobs=5, temperature=temperature, **settings)
    check_values(answer, exact, vocabulary, 5)


@pytest.mark.parametrize(
    "bias", [{"7042": 100}, {"7042": -100, "260": -100}, {"0": 100}, {"33662": 100}], ids=str
)
def test_values_are_those_before_the_bias_and_the_chosen_token_is_always_reported(
    client: Client, exact: Floats, vocabulary: Vocabulary, bias: dict[str, float]
) -> None:
    answer = ask(client, logprobs=5, temperature=0, logit_bias=bias, ignore_eos=True)
    check_values(answer, exact, vocabulary, 5)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.0001}, {"min_p": 1}], ids=str)
def test_twenty_candidates_are_reported_where_fewer_tokens_are_allowed(
    client: Client, exact: Floats, vocabulary: Vocabulary, settings: dict[str, Any]
) -> None:
    check_values(ask(client, logprobs=20, temperature=1, **settings), exact, vocabulary, 20)


def test_penalties_do_not_move_the_values(client: Client, exact: Floats, vocabulary: Vocabulary) -> None:
    settings = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    check_values(ask(client, logprobs=5, temperature=0, **settings), exact, vocabulary, 5)


def test_logprobs_zero_reports_the_chosen_token_alone(
    client: Client, exact: Floats, vocabulary: Vocabulary
) -> None:
    answer = ask(client, logprobs=0, temperature=0)
    (logprob,) = answer.logprobs
    assert logprob is not None
    assert abs(logprob - exact[vocabulary.id_of_text(answer.tokens[0])]) <= TOLERANCE
