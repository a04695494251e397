"""Case 36: a popular system prompt is found where it is cached, and does not pin all to one worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.scrape import wait_idle

pytestmark = pytest.mark.timeout(240)

PREFIX, TAIL, NUM_TOKENS = 512, 16, 32
# whole blocks of the prefix, less the last, which may be computed again
HIT = PREFIX - 32


@dataclass(frozen=True, slots=True)
class Served:
    """Who decoded it, and how many tokens of its prompt were cached where it was read."""

    worker: str
    num_cached: int


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.MULTI).client


def ask(client: Client, ids: list[int]) -> Served:
    body = {"prompt": ids, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    response = client.post(COMPLETIONS, body)
    assert response.status == 200, response.body
    usage = response.json()["usage"]
    (told,) = usage["baton"]["prompts"]
    return Served(told["decode_worker"], usage["prompt_tokens_details"]["cached_tokens"])


def shares(served: Sequence[Served]) -> list[float]:
    """Of the three workers, the largest first."""
    counts = Counter(one.worker for one in served)
    return sorted((counts[worker] / len(served) for worker in counts), reverse=True)


def batch(fleet: Fleet, num: int, num_prefixes: int, seed: int) -> list[list[int]]:
    models = fleet.models
    heads = [prompts.random_ids(models.bundled, PREFIX, seed + i) for i in range(num_prefixes)]
    tails = [prompts.random_ids(models.bundled, TAIL, seed + 1000 + i) for i in range(num)]
    return [heads[i % num_prefixes] + tail for i, tail in enumerate(tails)]


def test_one_after_the_other_finds_the_prefix_cached(fleet: Fleet, client: Client) -> None:
    wait_idle(client)
    served = [ask(client, ids) for ids in batch(fleet, 10, 1, 360_000)]
    assert sum(one.num_cached >= HIT for one in served[1:]) >= 8, served


def test_many_at_once_with_one_prefix_are_spread_over_all_workers(fleet: Fleet, client: Client) -> None:
    wait_idle(client)
    found = batch(fleet, 90, 1, 370_000)
    served = at_once([partial(ask, client, ids) for ids in found], limit=18)
    parts = shares(served)
    assert len(parts) == 3, parts
    assert parts[0] <= 0.60, parts
    assert parts[-1] >= 0.15, parts


def test_nine_prefixes_are_spread_and_still_found(fleet: Fleet, client: Client) -> None:
    wait_idle(client)
    found = batch(fleet, 90, 9, 380_000)
    served = at_once([partial(ask, client, ids) for ids in found], limit=18)
    parts = shares(served)
    assert parts[0] <= 0.50, parts
    assert sum(one.num_cached >= HIT for one in served) >= 0.7 * len(served)
