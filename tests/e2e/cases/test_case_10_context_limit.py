"""Case 10: a prompt or budget over the context is a 400 before any event, with true numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e import profiles, prompts
from tests.e2e.checks import refused, survives
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.scrape import wait_idle

pytestmark = pytest.mark.side_by_side

LIMIT = 256
CHAT_OVERHEAD = prompts.HI_CHAT_TOKENS - 1


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.CTX, "toy")


@pytest.fixture(scope="module")
def client(system: System) -> Client:
    return system.client


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_room_for_one_token_is_answered(client: Client, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": [prompts.HELLO] * 255, "max_tokens": 1, "temperature": 0}
    answer = client.stream_completion(**body) if stream else client.complete(**body)
    assert answer.num_prompt_tokens == 255
    assert answer.num_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [256, 257, 5000])
def test_a_longer_prompt_is_refused_with_the_true_limit_and_count(
    system: System, length: int, stream: bool
) -> None:
    with survives(system):
        body = {"prompt": [prompts.HELLO] * length, "max_tokens": 1, "stream": stream}
        error = refused(system.client, COMPLETIONS, body)
    assert error["code"] == "context_length_exceeded"
    assert str(LIMIT) in error["message"]
    if length < 1000 or "at least" not in error["message"]:
        assert str(length) in error["message"] or str(length + 1) in error["message"]
    wait_idle(system.client, 2.0)


def test_a_budget_over_the_context_meets_one_rule_on_both_endpoints(client: Client) -> None:
    words = " ".join(["hello"] * (200 - CHAT_OVERHEAD))
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [prompts.HELLO] * 200},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": words}]},
    }
    outcomes = set()
    for path, body in bodies.items():
        for stream in (False, True):
            response = client.post(
                path, {**body, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": stream}
            )
            outcomes.add(response.status)
            if response.status == 200 and not stream:
                assert response.json()["usage"]["completion_tokens"] == 56
                assert response.json()["choices"][0]["finish_reason"] == "length"
    assert outcomes in ({200}, {400}), outcomes


def test_an_absent_budget_never_makes_a_request_too_long(client: Client) -> None:
    words = " ".join(["hello"] * (200 - CHAT_OVERHEAD))
    for answer in (
        client.chat(words, temperature=0, ignore_eos=True),
        client.stream_chat(words, temperature=0, ignore_eos=True),
    ):
        assert answer.num_prompt_tokens == 200
        assert answer.num_tokens == 56
        assert answer.finish_reason == "length"
    near = client.complete([prompts.HELLO] * 250, temperature=0, ignore_eos=True)
    assert near.num_tokens == 6, "the default of completions is cut to what is left"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_two_megabytes_is_refused_at_once(system: System, stream: bool) -> None:
    with survives(system):
        start = time.monotonic()
        refused(system.client, COMPLETIONS, {"prompt": "hello " * 350_000, "stream": stream}, 400, 413)
        assert time.monotonic() - start < 2.0
    wait_idle(system.client, 2.0)
