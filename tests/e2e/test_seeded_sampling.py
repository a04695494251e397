"""Seeded sampling, in short: the same tokens alone and in company, split, cached, preempted or not."""

from __future__ import annotations

from functools import partial

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger
from tests.e2e.scrape import rise, scrape, wait_idle
from tests.e2e.seeded import Settings, check_sampled

NUM_TOKENS = 32
NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def batch(fleet: Fleet) -> list[list[int]]:
    return prompts.prompts_of_lengths(fleet.models.bundled, [5, 16, 33, 90], seed=90)


def ask(client: Client, ids: list[int], index: int) -> Answer:
    return client.complete(
        ids,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
        **settings(index).body(),
    )


def settings(index: int) -> Settings:
    return Settings(0.9, 0.9, seed=1000 + index)


@pytest.mark.parametrize("profile", [profiles.SPLIT, profiles.MONO, profiles.TINY], ids=lambda p: p.name)
def test_sampled_tokens_are_the_draws_from_the_references_logits(
    fleet: Fleet, batch: list[list[int]], profile: Profile
) -> None:
    client = fleet.system(profile).client
    reference, vocabulary = fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary
    wait_idle(client)
    before = scrape(client)
    ledger = Ledger()
    cold = [partial(ask, client, ids, index) for index, ids in enumerate(batch)]
    rounds = [at_once(cold), at_once(cold * 4), [ask(client, batch[0], 0)]]
    for answers in rounds:
        for index, answer in enumerate(answers):
            number = index % NUM_PROMPTS
            output = vocabulary.ids_of(answer)
            assert len(output) == NUM_TOKENS
            where = f"{profile.name}, prompt {number}"
            check_sampled(reference, batch[number], output, settings(number), ledger, where)
    ledger.check_share()
    wait_idle(client)
    if profile is profiles.TINY:
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
