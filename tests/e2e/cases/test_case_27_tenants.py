"""Case 27, and what a tenant with a key may have: a real service, over HTTP."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from core import telemetry
from router.api_keys import KeyScope
from router.key_file import editing, write_key_file
from tests.e2e import prompts, wire
from tests.e2e.client import COMPLETIONS, Client, assert_error_body
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile, System
from tests.e2e.scrape import scrape, wait_idle, wait_until
from tests.e2e.tenant_keys import add_key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants") / "keys.json"


@pytest.fixture(scope="module")
def tenants(fleet: Fleet, keys: Path) -> Iterator[tuple[System, dict[str, Client]]]:
    """A service with limits: `few` has six requests a minute, `short` few tokens, the others have none."""
    made = {name: add_key(keys, name) for name in ("a", "b", "few", "short")}
    made["operator"] = add_key(keys, "watch", KeyScope.OPERATOR)
    profile = Profile(
        "tenants",
        {
            "router.tenants.keys_file": str(keys),
            "router.tenants.reload_s": 0.2,
            "router.tenants.usage_file": str(keys.with_name("usage.jsonl")),
            "router.tenants.limits": [
                {"name": "few", "max_requests_per_minute": 6},
                {"name": "short", "max_output_tokens_per_minute": 40, "max_prompt_tokens_per_minute": 100},
            ],
            "router.plan": "local",  # one place for a prefix: near ties are left to chance
        },
        api_key=made["operator"],
    )
    with fleet.once(profile, fleet.models.path("toy")) as system:
        yield system, {name: Client(system.port, api_key=key) for name, key in made.items()}


@pytest.fixture(autouse=True)
def at_rest(tenants: tuple[System, dict[str, Client]]) -> None:
    wait_idle(tenants[1]["operator"])


def test_without_a_known_key_nothing_is_answered(tenants: tuple[System, dict[str, Client]]) -> None:
    system, clients = tenants
    for key in ("", "sk-baton-unknown", clients["a"].headers["authorization"][7:-1]):
        headers = {"authorization": f"Bearer {key}"}
        body = orjson.dumps({"model": clients["a"].model, "prompt": "x", "stream": True})
        response = wire.request(system.port, "POST", COMPLETIONS, body, headers=headers)
        error = assert_error_body(response, 401)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert wire.request(system.port, "GET", "/ready").status == 200
    assert wire.request(system.port, "GET", "/metrics", headers=clients["a"].headers).status == 403


def test_a_key_is_known_and_forgotten_while_the_service_runs(
    tenants: tuple[System, dict[str, Client]], keys: Path
) -> None:
    system, _ = tenants
    key = add_key(keys, "late")
    headers = {"authorization": f"Bearer {key}"}

    def status() -> int:
        return wire.request(system.port, "GET", "/v1/models", headers=headers).status

    wait_until(lambda: "" if status() == 200 else "not known yet", 10.0)
    with editing(keys) as content:
        left = tuple(entry for entry in content.entries if entry.tenant != "late")
        write_key_file(keys, replace(content, entries=left))
    wait_until(lambda: "" if status() == 401 else "still known", 10.0)


def test_case_27_no_cached_prefix_is_seen_by_another_tenant(
    fleet: Fleet, tenants: tuple[System, dict[str, Client]]
) -> None:
    _, clients = tenants
    a, b = clients["a"], clients["b"]
    ids = prompts.random_ids(fleet.models.bundled, 400, seed=27)

    def cached(client: Client) -> int:
        response = client.post(COMPLETIONS, {"prompt": ids, "max_tokens": 4, "temperature": 0})
        assert response.status == 200, response.body
        texts.add(response.json()["choices"][0]["text"])
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    texts: set[str] = set()
    assert cached(a) == 0
    assert cached(a) >= 384
    assert cached(b) == 0
    assert cached(b) >= 384
    assert cached(a) >= 384
    assert len(texts) == 1
    for field in ("cache_salt", "tenant", "adapter"):
        error = assert_error_body(b.post(COMPLETIONS, {"prompt": ids, field: "a"}), 400)
        assert error["param"] == field


def test_the_limit_of_requests_holds_and_its_retry_after_is_true(
    tenants: tuple[System, dict[str, Client]],
) -> None:
    _, clients = tenants
    few = clients["few"]
    body = {"prompt": "x", "max_tokens": 1}
    start = time.monotonic()
    first = [few.post(COMPLETIONS, body) for _ in range(9)]
    assert [response.status for response in first] == [200] * 6 + [429] * 3
    assert first[0].headers["x-ratelimit-limit-requests"] == "6"
    assert first[5].headers["x-ratelimit-remaining-requests"] == "0"
    for response in first[6:]:
        assert assert_error_body(response, 429)["type"] == "rate_limit_error"
        after = int(response.headers["retry-after"])
        assert 55 <= after <= 61
    assert few.post(COMPLETIONS, {"prompt": ["x"] * 2, "max_tokens": 1}).status == 429
    assert time.monotonic() - start < 20


def test_output_tokens_that_were_not_generated_come_back(tenants: tuple[System, dict[str, Client]]) -> None:
    _, clients = tenants
    short = clients["short"]
    body = {"prompt": "The", "max_tokens": 40, "temperature": 0, "stop_token_ids": list(range(100, 227))}
    generated = 0
    for _ in range(3):
        answer = short.post(COMPLETIONS, {**body, "max_tokens": min(10, 40 - generated)})
        assert answer.status == 200, answer.body
        generated += answer.json()["usage"]["completion_tokens"]
        left = int(answer.headers["x-ratelimit-remaining-output-tokens"])
        assert left <= 40 - generated + 10
    error = assert_error_body(short.post(COMPLETIONS, {"prompt": "x", "max_tokens": 41}), 400)
    assert error["param"] == "max_tokens"
    error = assert_error_body(short.post(COMPLETIONS, {"prompt": [500] * 101, "max_tokens": 1}), 400)
    assert error["param"] == "prompt"


def test_usage_is_metered_by_tenant_and_written_down_without_content(
    tenants: tuple[System, dict[str, Client]], keys: Path
) -> None:
    _, clients = tenants
    before = scrape(clients["operator"])
    response = clients["b"].post(COMPLETIONS, {"prompt": [900] * 20, "max_tokens": 7, "ignore_eos": True})
    assert response.status == 200
    after = scrape(clients["operator"])
    for kind, num in (("prompt", 20), ("output", 7)):
        rise = after.value(telemetry.TENANT_TOKENS, tenant="b", kind=kind)
        assert rise - before.value(telemetry.TENANT_TOKENS, tenant="b", kind=kind) == num
    path = keys.with_name("usage.jsonl")

    def lines() -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]

    wait_until(lambda: "" if lines()[-1]["tenant"] == "b" else "not written yet", 5.0)
    last = lines()[-1]
    assert (last["prompt_tokens"], last["output_tokens"], last["outcome"]) == (20, 7, "succeeded")
    assert set(last) == {
        *("time", "tenant", "key", "call", "model", "endpoint", "outcome", "reason", "seconds"),
        *("prompt_tokens", "cached_tokens", "output_tokens"),
    }
    total = sum(line["output_tokens"] for line in lines())
    metered = sum(after.by_label(telemetry.TENANT_TOKENS, "tenant", kind="output").values())
    assert math.isclose(total, metered)
    series = {sample.labels.get("tenant") for family in after.families.values() for sample in family.samples}
    assert series <= {None, "a", "b", "few", "short", "watch", "late", "operator"}
