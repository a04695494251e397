"""A conversation goes on: what decode has made of the first turn is sent to prefill instead of read again."""

from __future__ import annotations

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Fleet
from tests.e2e.killing import body
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until

BLOCK = 16
# 30 layers, keys and values, 3 heads of 64, fp32
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK


def test_a_second_turn_is_read_from_what_decode_has_made_of_the_first(fleet: Fleet) -> None:
    client, vocabulary = fleet.system(profiles.SPLIT).client, fleet.models.vocabulary
    reference = fleet.models.reference(fleet.models.bundled)
    first = prompts.random_ids(fleet.models.bundled, 100, seed=7100)
    answer = client.stream(COMPLETIONS, **body(first, 100)).only
    second = [*first, *vocabulary.ids_of(answer), *prompts.random_ids(fleet.models.bundled, 60, seed=7101)]
    wait_idle(client)
    num_made = (len(first) + 99) // BLOCK  # the last token's KV was not computed

    def not_known() -> str:
        reply = client.post("/debug/route", {"prompt": second, "max_tokens": 20})
        (prompt,) = reply.json()["prompts"]
        told = prompt["winner"]
        is_known = told["pull_from"] == "decode-0" and told["cached_tokens"] == num_made * BLOCK
        return "" if is_known and "pull" in told["terms_ms"] else str(told)

    wait_until(not_known, 10.0)
    before = scrape(client)
    answer = client.stream(COMPLETIONS, **body(second, 20)).only
    check_greedy(reference, second, vocabulary.ids_of(answer), Ledger(), "second turn", answer.logprobs)
    assert answer.usage is not None
    (told,) = answer.usage["baton"]["prompts"]
    assert (told["plan"], told["pull_from"]) == ("remote", "decode-0")
    assert told["cached_tokens"] == told["predicted_cached_tokens"] == num_made * BLOCK
    assert told["ttft_ms"]["pull"] > 0.0
    wait_idle(client)
    after = scrape(client)
    num_lent = num_made - len(first) // BLOCK  # what prefill has read itself does not travel
    assert rise(before, after, telemetry.KV_TRANSFER_BYTES, role="prefill") == num_lent * BLOCK_BYTES
    assert rise(before, after, telemetry.PULLED_TOKENS) == num_lent * BLOCK
    assert rise(before, after, telemetry.PULLS, outcome="done") == 1
