"""Acceptance, right tokens: forty prompts of 1 to 1,500 tokens, 48 greedy tokens, on every way of serving."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import at_once
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.right_tokens import Comparison, Prompt, check_prompt_logprobs, full_set, is_cold, is_warm
from tests.e2e.scrape import rise, scrape, wait_idle

pytestmark = pytest.mark.timeout(1200)

CHUNK_16 = Profile("chunk-16", {"router.plan": "remote", "prefill.token_budget": 16})
CHUNK_512 = Profile("chunk-512", {"router.plan": "remote", "prefill.token_budget": 512})
ALONE_16 = Profile("alone-16", {"router.plan": "local", "decode.prefill_chunk": 16})
EXACTLY: dict[str, Any] = {
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": 1,
}
PREEMPTING = Profile(
    "preempting",
    {
        "router.plan": "remote",
        "router.max_hold_s": 0,
        "prefill_engine.num_kv_blocks": 256,
        # the longest prompt and its answer take 97; of the short ones twenty start and each grows by three
        "decode_engine.num_kv_blocks": 100,
        "decode.max_num_seqs": 40,
    },
)


@pytest.fixture(scope="module")
def batch(fleet: Fleet) -> list[Prompt]:
    return full_set(fleet.models.bundled)


@pytest.fixture(scope="module")
def comparison(fleet: Fleet) -> Comparison:
    return Comparison(fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary)


@pytest.mark.parametrize("is_local", [True, False], ids=["one process", "Ray"])
def test_remote_prefill_alone_and_sixteen_at_once(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison, report: Report, is_local: bool
) -> None:
    client = fleet.system(CHUNK_512, is_local=is_local).client
    kind = "one process" if is_local else "Ray"
    wait_idle(client)
    before = scrape(client)
    cold = comparison.run(client, batch, f"{kind}, cold", at_a_time=2, is_cached=is_cold)
    report("b", f"remote prefill, {kind}, cold", cold)
    sent = rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES)
    assert sent > 0
    warm = comparison.run(client, batch, f"{kind}, cached", at_a_time=2, is_cached=is_warm)
    report("b", f"remote prefill, {kind}, cached", warm)
    crowd = comparison.run(client, batch, f"{kind}, 16 at once", at_a_time=16)
    report("b", f"remote prefill, {kind}, 16 at once", crowd)


@pytest.mark.parametrize("profile", [CHUNK_16, profiles.ALONE, ALONE_16, profiles.MONO], ids=lambda p: p.name)
def test_chunks_and_decode_prefilling_by_itself(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison, report: Report, profile: Profile
) -> None:
    client = fleet.system(profile).client
    wait_idle(client)
    before = scrape(client)
    report("b", f"{profile.name}, first", comparison.run(client, batch, profile.name, at_a_time=16))
    report("b", f"{profile.name}, again", comparison.run(client, batch, profile.name, at_a_time=16))
    wait_idle(client)
    sent = rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES)
    assert (sent > 0) == (profile.settings["router.plan"] == "remote")


def test_preempted_in_a_tiny_pool(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison, report: Report
) -> None:
    client = fleet.system(PREEMPTING).client
    wait_idle(client)
    before = scrape(client)
    ledger = comparison.run(client, batch, "tiny pool", at_a_time=40)
    wait_idle(client)
    preemptions = rise(before, scrape(client), telemetry.PREEMPTIONS)
    assert preemptions > 0
    report("b", f"tiny pool, {preemptions:.0f} preemptions", ledger)


@pytest.mark.parametrize("profile", [CHUNK_16, profiles.ALONE], ids=lambda p: p.name)
def test_teacher_forced_logprobs(
    fleet: Fleet, batch: list[Prompt], comparison: Comparison, report: Report, profile: Profile
) -> None:
    client = fleet.system(profile).client
    ledger = check_prompt_logprobs(comparison.reference, client, batch, profile.name)
    report("b", f"prompt logprobs, {profile.name}", ledger)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_toys_of_each_architecture_and_rope_kind_exactly(
    fleet: Fleet, report: Report, arch: str, rope: str
) -> None:
    folder: Path = fleet.models.toy(f"{arch}-{rope}", arch, rope=rope, max_position_embeddings=512)
    reference, vocabulary, ledger = fleet.models.reference(folder), fleet.models.vocabulary, Ledger()
    lengths = [1, 15, 16, 17, 48, 63, 64, 65, 120, 200]
    batch = prompts.prompts_of_lengths(fleet.models.bundled, lengths, seed=77)
    for profile in (profiles.CHUNK, profiles.ALONE):
        with fleet.once(profile, folder) as system:
            client = system.client
            for _ in range(2):
                jobs = [partial(client.complete, ids, **EXACTLY) for ids in batch]
                answers = at_once(jobs)
                for ids, answer in zip(batch, answers, strict=True):
                    output = vocabulary.ids_of(answer)
                    where = f"{arch}, {rope}, {len(ids)} ids"
                    check_greedy(reference, ids, output, ledger, where, answer.logprobs)
    assert not ledger.near_ties, "toys have wide gaps"
    report("b", f"toy {arch}, rope {rope}, split and not", ledger)
