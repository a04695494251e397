"""Seeded sampling, in short: the same tokens alone and in company, split, cached, preempted or not."""

from __future__ import annotations

from functools import partial

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger
from tests.e2e.scrape import rise, scrape, wait_idle
from tests.e2e.seeded import Settings, ask, check_sampled

pytestmark = pytest.mark.side_by_side

NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def batch(fleet: Fleet) -> list[list[int]]:
    return prompts.prompts_of_lengths(fleet.models.bundled, [5, 16, 33, 90], seed=90)


def settings(index: int) -> Settings:
    return Settings(0.9, 0.9, seed=1000 + index)


def check_rounds(
    fleet: Fleet, client: Client, batch: list[list[int]], num_tokens: int, rounds: list[list[int]], where: str
) -> None:
    """Each round asks for the prompts of the given numbers at once; all tokens are the draws."""
    reference, vocabulary = fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary
    ledger = Ledger()
    for numbers in rounds:
        jobs = [partial(ask, client, batch[number], settings(number), num_tokens) for number in numbers]
        for number, answer in zip(numbers, at_once(jobs), strict=True):
            output = vocabulary.ids_of(answer)
            assert len(output) == num_tokens
            story = f"{where}, prompt {number}"
            check_sampled(reference, batch[number], output, settings(number), ledger, story)
    ledger.check_share()


@pytest.mark.parametrize("profile", [profiles.SPLIT, profiles.MONO], ids=lambda p: p.name)
def test_sampled_tokens_are_the_draws_from_the_references_logits(
    fleet: Fleet, batch: list[list[int]], profile: Profile
) -> None:
    """Together and cold, sixteen at once and cached, alone and cached."""
    client = fleet.system(profile).client
    everyone = list(range(NUM_PROMPTS))
    check_rounds(fleet, client, batch, 24, [everyone, everyone * 4, [0]], profile.name)


def test_sampled_tokens_survive_preemption(fleet: Fleet) -> None:
    client = fleet.system(profiles.TINIEST).client
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [61, 62, 63, 64], seed=92)
    wait_idle(client)
    before = scrape(client)
    check_rounds(fleet, client, batch, 48, [list(range(NUM_PROMPTS))], "tiny pool")
    wait_idle(client)
    assert rise(before, scrape(client), telemetry.PREEMPTIONS) > 0, "nothing was preempted"


def test_four_samples_of_one_seed_differ_and_are_the_draws_of_their_index(
    fleet: Fleet, batch: list[list[int]]
) -> None:
    reference, vocabulary, ledger = (
        fleet.models.reference(fleet.models.bundled),
        fleet.models.vocabulary,
        Ledger(),
    )
    for profile in (profiles.SPLIT, profiles.MONO):
        answers = fleet.system(profile).client.answer_all(
            COMPLETIONS,
            prompt=batch[2],
            n=4,
            max_tokens=16,
            ignore_eos=True,
            skip_special_tokens=False,
            logprobs=0,
            **settings(7).body(),
        )
        assert len({answer.text for answer in answers}) == 4
        for answer in answers:
            output = vocabulary.ids_of(answer)
            where = f"{profile.name}, sample {answer.index}"
            check_sampled(reference, batch[2], output, settings(7), ledger, where, answer.index)
    ledger.check_share()
