"""Right tokens, in short: the same greedy tokens and logprobs as transformers, however a prompt is served.

The full grid is part of `make accept`.
"""

from __future__ import annotations

import pytest

from core import telemetry
from tests.e2e import profiles
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.right_tokens import Comparison, Prompt, check_prompt_logprobs, make_prompts, short_set
from tests.e2e.scrape import rise, scrape, wait_idle

pytestmark = pytest.mark.side_by_side

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def batch(fleet: Fleet) -> list[Prompt]:
    return short_set(fleet.models.bundled)


@pytest.fixture(scope="module")
def comparison(fleet: Fleet) -> Comparison:
    bundled = fleet.models.bundled
    return Comparison(fleet.models.reference(bundled), fleet.models.vocabulary, NUM_TOKENS)


@pytest.mark.parametrize(
    "profile", [profiles.SPLIT, profiles.ALONE, profiles.CHUNK, profiles.MONO], ids=lambda p: p.name
)
def test_twelve_prompts_equal_the_reference_first_and_again(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison, profile: Profile
) -> None:
    client = fleet.system(profile).client
    wait_idle(client)
    before = scrape(client)
    comparison.run(client, batch, f"{profile.name}, first", at_a_time=12)
    comparison.run(client, batch, f"{profile.name}, again", at_a_time=12)
    wait_idle(client)
    sent = rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES)
    is_split = profile.settings.get("router.plan") == "remote"
    assert (sent > 0) == is_split, f"{sent} bytes were handed over"


def test_prompts_that_are_preempted_equal_the_reference(fleet: Fleet, comparison: Comparison) -> None:
    client = fleet.system(profiles.TINIEST).client
    batch = make_prompts(fleet.models.bundled, [61, 62, 63, 64], 0, 0)
    wait_idle(client)
    before = scrape(client)
    longer = Comparison(comparison.reference, comparison.vocabulary, 48)
    longer.run(client, batch, "tiny pool", at_a_time=4)
    wait_idle(client)
    assert rise(before, scrape(client), telemetry.PREEMPTIONS) > 0, "nothing was preempted"


def test_prompt_logprobs_equal_the_reference(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison
) -> None:
    for profile in (profiles.SPLIT, profiles.CHUNK):
        client = fleet.system(profile).client
        check_prompt_logprobs(comparison.reference, client, batch, profile.name)
