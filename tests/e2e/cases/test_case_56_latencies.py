"""Case 56: the server's TTFT and ITL through preemption and with answers of one token: each counts once.

What the load test says of a server, of refusals and of streams that are cut: `tests/e2e/test_loadtest.py` and
`tests/integration/cluster/loadtest`.
"""

from __future__ import annotations

from functools import partial

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import at_once
from tests.e2e.fleet import Fleet
from tests.e2e.scrape import Scrape, rise, scrape, wait_idle

NUM_TOKENS = 150
_MOST_TURNS = 20


def total(before: Scrape, after: Scrape, name: str, part: str) -> float:
    return rise(before, after, f"{name}_{part}")


def test_first_tokens_and_gaps_add_up_although_sequences_are_preempted(fleet: Fleet) -> None:
    client = fleet.system(profiles.TINY, "toy").client
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [60] * 4, seed=56)
    ask = partial(client.stream_completion, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
    wait_idle(client)
    before = after = scrape(client)
    num_asked = 0
    while not rise(before, after, telemetry.PREEMPTIONS):
        assert num_asked < 4 * _MOST_TURNS, "the pool was not too small"
        at_once([partial(ask, ids) for ids in batch])
        num_asked += 4
        wait_idle(client)
        after = scrape(client)
    assert total(before, after, telemetry.TTFT_SECONDS, "count") == num_asked
    assert total(before, after, telemetry.ITL_SECONDS, "count") == num_asked * (NUM_TOKENS - 1)
    assert total(before, after, telemetry.E2E_SECONDS, "count") == num_asked
    whole = total(before, after, telemetry.E2E_SECONDS, "sum")
    parts = sum(total(before, after, name, "sum") for name in (telemetry.TTFT_SECONDS, telemetry.ITL_SECONDS))
    # what is left is the end of a request after its last token
    assert 0.8 * whole < parts <= whole + 1e-6, (parts, whole)


def test_an_answer_of_one_token_has_a_first_token_and_no_gap_and_a_refused_one_has_neither(
    fleet: Fleet,
) -> None:
    client = fleet.system(profiles.TINY, "toy").client
    wait_idle(client)
    before = scrape(client)
    for stream in (False, True):
        body = {"prompt": "one", "max_tokens": 1, "stream": stream}
        assert client.post("/v1/completions", body).status == 200
        assert client.post("/v1/completions", {**body, "max_tokens": -1}).status == 400
    assert client.chat("one", max_tokens=1).num_tokens == 1
    wait_idle(client)
    after = scrape(client)
    assert total(before, after, telemetry.TTFT_SECONDS, "count") == 3
    assert total(before, after, telemetry.ITL_SECONDS, "count") == 0
    assert total(before, after, telemetry.E2E_SECONDS, "count") == 3
