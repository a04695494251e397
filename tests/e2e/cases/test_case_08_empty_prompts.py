"""Case 08: empty prompts are refused (SmolLM2 has no start token to begin from), and hurt nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import profiles
from tests.e2e.checks import refused_both, survives
from tests.e2e.client import CHAT, COMPLETIONS, Client, as_messages, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System

pytestmark = pytest.mark.side_by_side

EMPTY: list[Any] = ["", [""], [[]], [], ["", "Hello"], [[], [28120]], None]


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.SPLIT)


def is_accepted(client: Client, prompt: Any) -> bool:
    """One choice for every empty prompt: 400, or an answer that starts from one token."""
    response = client.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "temperature": 0})
    if response.status == 200:
        assert response.json()["usage"]["prompt_tokens"] in (1, 2)
    return response.status == 200


def test_empty_prompts_meet_the_same_rule_everywhere_while_a_stream_runs_on(system: System) -> None:
    client = system.client
    long = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    alone = client.stream(COMPLETIONS, **long).only

    def disturb() -> None:
        rule = is_accepted(client, "")
        for prompt in ([""], ["", "Hello"]):
            assert is_accepted(client, prompt) == rule, prompt
        always_refused = [[[]], [], [[], [28120]], None]
        for prompt in always_refused if rule else EMPTY:
            refused_both(client, COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
        refused_both(client, COMPLETIONS, {"max_tokens": 2})
        refused_both(client, CHAT, {"messages": [], "max_tokens": 2})

    with survives(system):
        beside, _ = at_once([lambda: client.stream(COMPLETIONS, **long).only, disturb])
    assert beside is not None
    assert beside.text == alone.text
    assert beside.num_tokens == 100


def test_an_empty_user_message_is_a_prompt_like_any_other(system: System) -> None:
    for answer in (
        system.client.chat(as_messages(""), max_tokens=4, temperature=0),
        system.client.stream_chat(as_messages(""), max_tokens=4, temperature=0),
    ):
        assert answer.num_prompt_tokens == 30
        assert answer.finish_reason in ("stop", "length")
