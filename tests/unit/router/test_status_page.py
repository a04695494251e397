"""What the status page is told: workers, flows, calls and why; never content, never without a key."""

from __future__ import annotations

from typing import Any

import pytest

from core.ids import Role
from core.jobs import WatchEvent
from router.api_keys import KeyScope, new_entry, new_key, new_salt
from router.tenants_config import TenantsConfig
from tests.doubles import settle
from tests.unit.router.api import Api, serving
from tests.unit.router.scripted import ScriptedWorker, new_status

REMOTE = {"plan": "remote"}


def _workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


async def _state(api: Api) -> dict[str, Any]:
    response = await api.http.get("/dashboard/state")
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


async def test_a_call_that_has_ended_is_told_with_its_way_its_times_and_why() -> None:
    async with serving(*_workers(), **REMOTE) as api:
        answer = (await api.complete(prompt="the", max_tokens=5)).json()
        state = await _state(api)
    (call,) = state["calls"]
    (prompt,) = call["prompts"]
    assert (call["id"], call["outcome"], call["output_tokens"]) == (answer["id"], "succeeded", 5)
    assert (prompt["plan"], prompt["prefill_worker"], prompt["decode_worker"]) == ("remote", "p", "d")
    assert "remote is the only plan" in prompt["why"] or "remote costs" in prompt["why"]
    assert prompt["ttft_ms"]["total"] >= 0
    assert state["flows"] == [
        {"prefill": "p", "decode": "d", "prompts": 1, "tokens": answer["usage"]["prompt_tokens"]}
    ]
    assert state["totals"]["outcomes"] == {"succeeded": 1}
    assert state["totals"]["output_tokens"] == 5


async def test_calls_that_were_refused_or_given_up_are_told_too() -> None:
    async with serving(*_workers()) as api:
        await api.complete(prompt="the", foo=1)
        state = await _state(api)
    (call,) = state["calls"]
    assert (call["outcome"], call["prompts"]) == ("rejected", [])


async def test_workers_are_told_with_role_state_and_blocks() -> None:
    prefill, decode = _workers()
    async with serving(prefill, decode) as api:
        decode.tell(WatchEvent(0, status=new_status(decode.ref)))
        await settle()
        workers = {worker["id"]: worker for worker in (await _state(api))["workers"]}
    assert {name: (worker["role"], worker["state"]) for name, worker in workers.items()} == {
        "p": ("prefill", "alive"),
        "d": ("decode", "alive"),
    }
    blocks = workers["d"]["status"]["blocks"]
    assert set(blocks) == {"held", "cached", "free", "quarantined"}


async def test_nothing_that_was_said_is_told() -> None:
    async with serving(*_workers()) as api:
        answer = (await api.complete(prompt="zanzibar", max_tokens=6)).json()
        text = (await api.http.get("/dashboard/state")).text
    assert "zanzibar" not in text
    assert answer["choices"][0]["text"] not in text


async def test_memory_is_bounded_and_only_the_last_minute_counts() -> None:
    async with serving(*_workers()) as api:
        for _ in range(45):
            await api.complete(prompt="the", max_tokens=1)
        state = await _state(api)
    assert len(state["calls"]) == 40
    assert state["totals"]["outcomes"] == {"succeeded": 45}


async def test_the_state_is_the_operators_where_keys_are_asked_for() -> None:
    entries = {scope: (key := new_key(), new_entry(key, "t", new_salt(), scope)) for scope in KeyScope}
    tenants = TenantsConfig(keys=tuple(entry.as_text() for _, entry in entries.values()))
    async with serving(*_workers(), tenants=tenants) as api:
        statuses = {
            scope: (
                await api.http.get("/dashboard/state", headers={"authorization": f"Bearer {key}"})
            ).status_code
            for scope, (key, _) in entries.items()
        }
        assert (await api.http.get("/dashboard/state")).status_code == 401
        page = await api.http.get("/dashboard")
        assert page.status_code == 200, "the page itself holds no data; it asks for the key"
    assert statuses.pop(KeyScope.OPERATOR) == 200
    assert set(statuses.values()) == {403}


@pytest.mark.parametrize("path", ["", "/main.js", "/page.css", "/mark.svg"])
async def test_the_page_loads_from_itself_alone_and_runs_nothing_inline(path: str) -> None:
    async with serving() as api:
        response = await api.http.get(f"/dashboard{path}")
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        for word in ("https://", "onclick=", "style=", "innerHTML", "eval("):
            assert word not in response.text
        assert (await api.http.get("/dashboard/../config.py")).status_code == 404
        assert (await api.http.get("/dashboard/nothing.js")).status_code == 404
