"""Answers say where each millisecond went: the parts are the time that the client has waited."""

from __future__ import annotations

from functools import partial

import pytest

from core import telemetry
from tests.e2e import explained, profiles, prompts
from tests.e2e.client import at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.scrape import rise, scrape, wait_idle

PLANS = [(profiles.SPLIT, "remote"), (profiles.ALONE, "local")]


@pytest.mark.parametrize(("profile", "plan"), PLANS, ids=["remote", "local"])
def test_the_parts_add_up_to_the_time_to_first_token(fleet: Fleet, profile: Profile, plan: str) -> None:
    client = fleet.system(profile).client
    wait_idle(client)
    before = scrape(client)
    found = [
        explained.ask(client, prompts.random_ids(fleet.models.bundled, length, seed=9000 + length))
        for length in (20, 100, 200, 300, 400)
    ]
    for one in found:
        one.check()
        assert one.told["plan"] == plan
        assert one.told["stalls"] == []
        assert one.parts["prefill"] > 0.5 * one.told["ttft_ms"]["total"], one.told
        assert ("transfer_wait_ms" in one.told) == (plan == "remote")
    # beside other work of the machine one of them may have been late
    assert sum(one.is_close for one in found) >= len(found) - 1, [one.outside_ms for one in found]
    after = scrape(client)
    parts = rise(before, after, f"{telemetry.TTFT_PART_SECONDS}_sum")
    assert parts == pytest.approx(rise(before, after, f"{telemetry.TTFT_SECONDS}_sum"), rel=1e-6)


def test_of_prompts_that_come_together_the_later_ones_have_queued(fleet: Fleet) -> None:
    client = fleet.system(profiles.SPLIT).client
    wait_idle(client)
    ids = [prompts.random_ids(fleet.models.bundled, 400, seed=9100 + number) for number in range(3)]
    found = at_once([partial(explained.ask, client, one) for one in ids])
    for one in found:
        one.check()
    queued = sorted(one.parts["queue"] + one.parts["place"] + one.parts["admit"] for one in found)
    assert queued[-1] > 5 * max(1.0, queued[0]), [one.told for one in found]


def test_what_is_cached_is_predicted_and_found(fleet: Fleet) -> None:
    client = fleet.system(profiles.ALONE).client
    ids = prompts.random_ids(fleet.models.bundled, 200, seed=9999)
    first = explained.ask(client, ids)
    assert (first.told["predicted_cached_tokens"], first.told["cached_tokens"]) == (0, 0)
    wait_idle(client)
    again = explained.ask(client, ids)
    assert again.told["cached_tokens"] == 192
    assert again.told["predicted_cached_tokens"] == 192
    again.check()


def test_a_placement_is_explained_beforehand(fleet: Fleet) -> None:
    client = fleet.system(profiles.STD).client
    wait_idle(client)
    before = scrape(client)
    answer = client.post("/debug/route", {"prompt": prompts.random_ids(fleet.models.bundled, 100, seed=1)})
    assert answer.status == 200, answer.body
    (prompt,) = answer.json()["prompts"]
    assert {candidate["role"] for candidate in prompt["candidates"]} == {"prefill", "decode"}
    assert {prompt["winner"]["plan"], *(other["plan"] for other in prompt["others"])} == {"remote", "local"}
    assert rise(before, scrape(client), telemetry.PLACEMENTS) == 0
