"""Case 35: the split system equals the monolithic one, also after many requests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.checks import assert_same
from tests.e2e.client import Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle

pytestmark = pytest.mark.side_by_side

BLOCK = 16
CHUNK = 32
LENGTHS = [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 511, 512, 513, 700]
NUM_PROMPTS = 60
ON_MODELS = pytest.mark.parametrize(
    ("model", "num_requests"), [("toy", 300), pytest.param("smollm2", 300, marks=pytest.mark.slow)]
)


def make_prompts(fleet: Fleet) -> list[list[int]]:
    generator = random.Random(5)
    lengths = LENGTHS + [generator.randint(3, 250) for _ in range(NUM_PROMPTS - len(LENGTHS))]
    generator.shuffle(lengths)
    return prompts.prompts_of_lengths(fleet.models.bundled, lengths, seed=35)


def ask(client: Client, ids: Sequence[int]) -> Answer:
    start = time.monotonic()
    answer = client.complete(ids, max_tokens=16, temperature=0, ignore_eos=True, logprobs=3)
    assert time.monotonic() - start < 20.0, f"{len(ids)} ids took too long"
    return answer


@ON_MODELS
@pytest.mark.parametrize("profile", [profiles.SPLIT, profiles.CHUNK, profiles.MONO], ids=lambda p: p.name)
def test_sixty_prompts_equal_the_reference_alone_and_six_at_once(
    fleet: Fleet, profile: Profile, model: str, num_requests: int
) -> None:
    del num_requests
    client = fleet.system(profile, model).client
    reference = fleet.models.reference(fleet.models.path(model))
    vocabulary, ledger = fleet.models.vocabulary, Ledger()
    batch = make_prompts(fleet)
    alone = [ask(client, ids) for ids in batch[:10]]
    together = at_once([partial(ask, client, ids) for ids in batch], limit=6)
    for ids, answer in [*zip(batch, alone, strict=False), *zip(batch, together, strict=True)]:
        output = vocabulary.ids_of(answer)
        assert len(output) == 16
        check_greedy(reference, ids, output, ledger, f"{profile.name}, {len(ids)} ids", answer.logprobs)
    ledger.check_share()


@ON_MODELS
def test_after_hundreds_of_requests_the_first_answers_come_again(
    fleet: Fleet, model: str, num_requests: int
) -> None:
    client = fleet.system(profiles.SPLIT, model).client
    batch = make_prompts(fleet)
    first = [ask(client, ids) for ids in batch[:10]]
    generator = random.Random(35)
    order = [generator.choice(batch) for _ in range(num_requests)]
    at_once([partial(ask, client, ids) for ids in order], limit=6)
    for ids, before, after in zip(batch, first, [ask(client, ids) for ids in batch[:10]], strict=False):
        assert_same(before, after, f"{len(ids)} ids, first and last")
    wait_idle(client)


def test_the_transferred_bytes_are_those_of_the_prompts_blocks(fleet: Fleet) -> None:
    client = fleet.system(profiles.SPLIT).client
    wait_idle(client)
    before = scrape(client)
    num_blocks = 0
    for length in (1, 15, 16, 17, 100, 513):
        ask(client, prompts.random_ids(fleet.models.bundled, length, seed=3500 + length))
        num_blocks += -(-length // BLOCK)
    wait_idle(client)
    # 30 layers, keys and values, 3 heads of 64, fp32
    block_bytes = 30 * 2 * 3 * 64 * 4 * BLOCK
    assert rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES) == num_blocks * block_bytes
