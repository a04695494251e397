"""What the router says of itself: models, readiness, metrics that add up."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.errors import StepFailed
from core.ids import Role
from tests.doubles import settle
from tests.unit.router.api import serving
from tests.unit.router.model_answers import (
    REMOTE,
    bare_call,
    error_message,
    two_workers,
)
from tests.unit.router.scripted import ScriptedWorker

# ---------------------------------------------------------------- pages


async def test_the_served_model_is_listed_and_no_other_is_known() -> None:
    async with serving() as api:
        listed = (await api.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["toy"]
        assert (await api.http.get("/v1/models/")).json() == listed
        assert (await api.http.get("/v1/models/toy")).json() == listed["data"][0]
        error_message(await api.http.get("/v1/models/a/b"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("roles", "status", "degraded"),
    [
        ([], 503, ["prefill", "decode"]),
        ([Role.PREFILL], 503, ["decode"]),
        ([Role.DECODE], 200, ["prefill"]),
        ([Role.PREFILL, Role.DECODE], 200, []),
    ],
)
async def test_ready_names_what_is_missing_and_health_is_the_routers_own(
    roles: list[Role], status: int, degraded: list[str]
) -> None:
    async with serving(*(ScriptedWorker(role, role.value) for role in roles)) as api:
        response = await api.http.get("/ready")
        assert (response.status_code, response.json()["degraded"]) == (status, degraded)
        assert (await api.http.get("/health")).status_code == 200


async def test_one_scrape_covers_the_router_and_all_workers() -> None:
    prefill, decode = two_workers()
    prefill.exposition = decode.exposition = b"# HELP x Text.\n# TYPE x gauge\nx 1\n"
    async with serving(prefill, decode, **REMOTE) as api:
        await api.complete(prompt="the", max_tokens=4)
        response = await api.http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert {sample.labels["worker_id"] for sample in families["x"].samples} == {"p", "d"}
        assert await api.metric("baton_ttft_seconds_count", endpoint="completions", model="toy") == 1
        assert await api.metric("baton_itl_seconds_count") == 3
        assert await api.metric("baton_e2e_seconds_count") == 1
        assert await api.metric("baton_placements_total", plan="remote") == 1
        assert await api.metric("baton_workers", role="decode", state="alive") == 1


async def test_what_was_started_is_what_ended_whatever_happened() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        await api.complete(prompt="the")
        await api.complete(prompt="the", stream=True)
        await api.complete(prompt="the", foo=1)
        await api.complete(prompt="the", model="no-such-model")
        await api.http.post("/v1/chat/completions", content=b"{")
        worker.on_generate = lambda job: StepFailed("boom")
        await api.complete(prompt="the")
        worker.on_generate, worker.pause_at = None, 1
        task, gone, _ = await bare_call(api, {})
        await settle()
        gone.set()
        await task
        totals = {
            outcome: await api.metric("baton_requests_total", outcome=outcome)
            for outcome in ("succeeded", "failed", "aborted", "rejected")
        }
        assert totals == {"succeeded": 2, "failed": 1, "aborted": 1, "rejected": 3}
        assert await api.metric("baton_requests_started_total") == 7


async def test_nothing_that_a_client_sends_becomes_a_series() -> None:
    async with serving(*two_workers()) as api:
        await api.complete(prompt="the", model="known-not")
        await api.http.get("/v1/warm-up")

        async def count() -> int:
            return len((await api.http.get("/metrics")).text.splitlines())

        before = await count()
        for number in range(30):
            name = f"x{number}\n\"'{{}}"
            await api.post("/v1/completions", {"X-Request-Id": f"id-{number}"}, model=name, user=name)
            await api.http.get(f"/v1/xyz{number}")
            await api.http.request("BREW", f"/pot/{number}")
        assert await count() - before <= 4
