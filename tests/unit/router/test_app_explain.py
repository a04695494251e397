"""What answers say about where they went and where their time went, and what /debug/route says beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import WorkerLost
from core.ids import Role
from core.telemetry import TTFTPart
from router.api_keys import KeyScope, new_entry, new_key, new_salt
from router.tenants_config import TenantsConfig
from tests.unit.router.api import Api, events_of, serving
from tests.unit.router.scripted import ScriptedWorker

REMOTE = {"plan": "remote"}


def _workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


def _check_sum(ttft_ms: dict[str, float]) -> None:
    parts = dict(ttft_ms)
    total = parts.pop("total")
    assert set(parts) <= {part.value for part in TTFTPart}
    assert sum(parts.values()) == pytest.approx(total, abs=0.001 * len(parts))


async def test_usage_tells_workers_plan_hits_and_the_parts_of_the_time_to_first_token() -> None:
    prefill, decode = _workers()
    prefill.num_cached_tokens = 2
    async with serving(prefill, decode, **REMOTE) as api:
        response = await api.complete(prompt="the", max_tokens=5)
    told = response.json()["usage"]["baton"]
    assert told["request_id"] == response.json()["id"]
    (prompt,) = told["prompts"]
    _check_sum(prompt.pop("ttft_ms"))
    terms = prompt.pop("terms_ms")
    assert "prefill" in terms
    assert prompt == {
        "plan": "remote",
        "prefill_worker": "p",
        "decode_worker": "d",
        "pull_from": None,
        "predicted_cached_tokens": 0,
        "cached_tokens": 2,
        "num_attempts": 1,
        "stalls": [],
    }


async def test_the_headers_of_a_stream_tell_what_is_known_at_its_first_token() -> None:
    prefill, decode = _workers()
    prefill.num_cached_tokens = 2
    async with serving(prefill, decode, **REMOTE) as api:
        headers = (await api.complete(prompt="the", max_tokens=5, stream=True)).headers
    assert headers["x-baton-plan"] == "remote"
    assert (headers["x-baton-prefill-worker"], headers["x-baton-decode-worker"]) == ("p", "d")
    assert (headers["x-baton-predicted-cached-tokens"], headers["x-baton-cached-tokens"]) == ("0", "2")
    parts = (part.split("=") for part in headers["x-baton-ttft-ms"].split(", "))
    _check_sum({name: float(ms) for name, ms in parts})


async def test_the_last_event_of_a_stream_carries_the_same_object_as_a_whole_answer() -> None:
    async with serving(*_workers(), **REMOTE) as api:
        whole = (await api.complete(prompt=["a", "b"], max_tokens=3)).json()["usage"]["baton"]
        body = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}
        streamed = events_of(await api.complete(**body, stream_options={"include_usage": True}))
    told = streamed[-2]["usage"]["baton"]
    assert len(told["prompts"]) == len(whole["prompts"]) == 2
    assert [prompt.keys() for prompt in told["prompts"]] == [prompt.keys() for prompt in whole["prompts"]]


async def test_explanations_can_be_switched_off() -> None:
    async with serving(*_workers(), explain=False, **REMOTE) as api:
        response = await api.complete(prompt="the", max_tokens=5)
    assert "baton" not in response.json()["usage"]
    told = {name for name in response.headers if name.startswith("x-baton-")}
    assert told == {"x-baton-seed"}


async def test_a_lost_worker_is_a_second_attempt_and_time_of_its_own() -> None:
    prefill, decode = _workers()
    failures: list[object] = [WorkerLost("gone", worker_id="p")]
    prefill.on_prefill = lambda job: failures.pop() if failures else None  # type: ignore[return-value]
    other = ScriptedWorker(Role.PREFILL, "q")
    async with serving(prefill, decode, other, **REMOTE) as api:
        answers = [await api.complete(prompt="the", max_tokens=5) for _ in range(4)]
    prompts = [answer.json()["usage"]["baton"]["prompts"][0] for answer in answers]
    (again,) = [prompt for prompt in prompts if prompt["num_attempts"] == 2]
    assert "retry" in again["ttft_ms"]
    _check_sum(again["ttft_ms"])


async def test_the_parts_are_counted_and_add_up_to_the_time_to_first_token() -> None:
    async with serving(*_workers(), **REMOTE) as api:
        for _ in range(3):
            await api.complete(prompt="the", max_tokens=5)
        parts = await api.metric("baton_ttft_part_seconds_sum")
        assert parts == pytest.approx(await api.metric("baton_ttft_seconds_sum"))
        assert await api.metric("baton_ttft_part_seconds_count", part="prefill") == 3


async def _route(api: Api, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return await api.post("/debug/route", headers, **body)


async def test_debug_route_tells_where_a_request_would_go_and_runs_nothing() -> None:
    prefill, decode = _workers()
    async with serving(prefill, decode) as api:
        answer = (await _route(api, prompt=[1, 2, 3], max_tokens=20)).json()
        assert await api.metric("baton_placements_total") == 0
    (prompt,) = answer["prompts"]
    assert answer["policy"] == "cost"
    assert prompt["num_prompt_tokens"] == 3
    assert {candidate["worker"] for candidate in prompt["candidates"]} == {"p", "d"}
    winner, others = prompt["winner"], prompt["others"]
    assert {winner["plan"], *(other["plan"] for other in others)} == {"remote", "local"}
    assert winner["cost_ms"] == pytest.approx(sum(winner["terms_ms"].values()), abs=0.01)
    assert winner["plan"] in prompt["why"]
    assert not prefill.prefills
    assert not decode.generates


async def test_debug_route_explains_chats_and_refuses_what_the_endpoints_refuse() -> None:
    async with serving(*_workers()) as api:
        messages = [{"role": "user", "content": "hello"}]
        chat = (await _route(api, messages=messages)).json()
        assert chat["prompts"][0]["num_prompt_tokens"] > 5
        refused = await _route(api, prompt="the", temperature=9)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "temperature"


async def test_debug_route_says_why_nothing_can_be_placed() -> None:
    async with serving() as api:
        (prompt,) = (await _route(api, prompt="the")).json()["prompts"]
    assert prompt["winner"] is None
    assert "no worker" in prompt["why"]


async def test_debug_route_is_the_operators_where_keys_are_asked_for() -> None:
    entries = {scope: (key := new_key(), new_entry(key, "t", new_salt(), scope)) for scope in KeyScope}
    tenants = TenantsConfig(keys=tuple(entry.as_text() for _, entry in entries.values()))
    async with serving(*_workers(), tenants=tenants) as api:
        statuses = {
            scope: (await _route(api, {"authorization": f"Bearer {key}"}, prompt="the")).status_code
            for scope, (key, _) in entries.items()
        }
        assert (await _route(api, prompt="the")).status_code == 401
    assert statuses[KeyScope.OPERATOR] == 200
    assert all(status == 403 for scope, status in statuses.items() if scope is not KeyScope.OPERATOR)


async def test_where_a_request_for_another_model_would_go_is_not_told() -> None:
    async with serving(*_workers()) as api:
        response = await _route(api, model="other", prompt="the")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
