"""Case 25: at each block border the cached answer is the cold one, and one token is always computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.checks import assert_same
from tests.e2e.client import Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger, Reference, check_greedy
from tests.e2e.vocabulary import Vocabulary

pytestmark = pytest.mark.side_by_side

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 64)
BY_PROFILE = pytest.mark.parametrize("profile", [profiles.SPLIT, profiles.CHUNK], ids=lambda p: p.name)


def ask(client: Client, ids: Sequence[int]) -> Answer:
    return client.complete(ids, max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)


def check_cached(answer: Answer, length: int, most: int) -> None:
    """A whole number of blocks, or all but the last token; never more than was sent before."""
    cached = answer.num_cached_tokens
    assert cached % BLOCK == 0 or cached == length - 1, f"{cached} of {length} cached"
    assert cached < length, "one token must be computed to get logits"
    assert cached <= most, f"{cached} of {length} cached, at most {most} can be"


class Oracle:
    """Checks answers against the reference and keeps count."""

    def __init__(self, reference: Reference, vocabulary: Vocabulary) -> None:
        self._reference, self._vocabulary, self.ledger = reference, vocabulary, Ledger()

    def check(self, ids: Sequence[int], answer: Answer, where: str) -> None:
        output = self._vocabulary.ids_of(answer)
        assert len(output) == 8, where
        check_greedy(self._reference, ids, output, self.ledger, where, answer.logprobs)


@pytest.fixture(scope="module")
def oracle(fleet: Fleet, vocabulary: Vocabulary) -> Oracle:
    return Oracle(fleet.models.reference(fleet.models.bundled), vocabulary)


@BY_PROFILE
@pytest.mark.parametrize("length", LENGTHS)
def test_three_runs_of_a_prompt_agree_with_each_other_and_with_the_reference(
    fleet: Fleet, oracle: Oracle, profile: Profile, length: int
) -> None:
    client = fleet.system(profile).client
    ids = prompts.random_ids(fleet.models.bundled, length, seed=2500 + length)
    cold, *warm = [ask(client, ids) for _ in range(3)]
    assert cold.num_cached_tokens == 0
    oracle.check(ids, cold, f"{length} ids, cold")
    whole = (length - 1) // BLOCK * BLOCK
    for answer in warm:
        check_cached(answer, length, length - 1)
        assert answer.num_cached_tokens >= whole, "what was just sent is cached"
        assert_same(cold, answer, f"{length} ids, cached")


@BY_PROFILE
@pytest.mark.parametrize("length", [15, 16, 33, 64])
def test_longer_prompts_reuse_what_their_beginning_left(
    fleet: Fleet, oracle: Oracle, profile: Profile, length: int
) -> None:
    client = fleet.system(profile).client
    ids = prompts.random_ids(fleet.models.bundled, length + 16, seed=2600 + length)
    ask(client, ids[:length])
    for more in (1, 16):
        longer = ids[: length + more]
        answer = ask(client, longer)
        check_cached(answer, len(longer), len(longer) - 1)
        assert answer.num_cached_tokens >= length // BLOCK * BLOCK
        oracle.check(longer, answer, f"{length} + {more} ids")


@BY_PROFILE
def test_a_shared_prefix_counts_in_whole_blocks(fleet: Fleet, oracle: Oracle, profile: Profile) -> None:
    client = fleet.system(profile).client
    bundled = fleet.models.bundled
    ids = prompts.random_ids(bundled, 40, seed=2700)
    ask(client, ids)
    for shared, expected in ((16, 16), (15, 0), (31, 16)):
        other = [*ids[:shared], *prompts.random_ids(bundled, 40 - shared, seed=2800 + shared)]
        answer = ask(client, other)
        assert answer.num_cached_tokens == expected, f"{shared} ids shared"
        oracle.check(other, answer, f"{shared} ids shared")


@BY_PROFILE
def test_eight_interleaved_prompts_agree_with_their_solo_runs(
    fleet: Fleet, oracle: Oracle, profile: Profile
) -> None:
    client = fleet.system(profile).client
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [15, 16, 17, 32, 33, 48, 64, 80], seed=29)
    for turn in range(2):
        answers = at_once([partial(ask, client, ids) for ids in batch])
        for ids, answer in zip(batch, answers, strict=True):
            oracle.check(ids, answer, f"{len(ids)} ids among eight, turn {turn}")
    oracle.ledger.check_share()


def test_without_a_cache_nothing_is_cached_and_the_answers_are_the_same(fleet: Fleet, oracle: Oracle) -> None:
    client = fleet.system(profiles.MONO).client
    for length in (1, 16, 33, 64):
        ids = prompts.random_ids(fleet.models.bundled, length, seed=2500 + length)
        for _ in range(2):
            answer = ask(client, ids)
            assert answer.num_cached_tokens == 0
            oracle.check(ids, answer, f"{length} ids without a cache")
