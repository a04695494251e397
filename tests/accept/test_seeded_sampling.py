"""Acceptance, seeded sampling: identical tokens on every way, and draws that have the exact distribution."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from core import telemetry
from core.request import SamplingParams
from engine.sampling.row import SamplingRow
from engine.sampling.sampler import Sampler
from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, at_once
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.reference import Ledger
from tests.e2e.scrape import rise, scrape, wait_idle
from tests.e2e.seeded import Settings, ask, check_sampled

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 48
LENGTHS = [1, 5, 15, 16, 17, 33, 64, 90, 128, 150, 200, 255, 256, 257, 280, 300]
PREEMPTING = Profile(
    "seeded-preempting",
    {
        "router.plan": "remote",
        "router.max_hold_s": 0,
        "decode_engine.num_kv_blocks": 40,
        "decode.max_num_seqs": 16,
    },
)
NUM_DRAWS = 20_000


@pytest.fixture(scope="module")
def batch(fleet: Fleet) -> list[list[int]]:
    return prompts.prompts_of_lengths(fleet.models.bundled, LENGTHS, seed=91)


def settings(index: int) -> Settings:
    return Settings(0.9, 0.9, seed=2000 + index)


@pytest.mark.parametrize(
    ("profile", "is_local"),
    [
        (profiles.SPLIT, True),
        (profiles.MONO, True),
        (profiles.ALONE, True),
        (PREEMPTING, True),
        (profiles.SPLIT, False),
    ],
    ids=lambda value: value.name if isinstance(value, Profile) else "local" if value else "Ray",
)
def test_sixteen_prompts_alone_and_together_first_and_again(
    fleet: Fleet, batch: list[list[int]], report: Report, profile: Profile, is_local: bool
) -> None:
    client = fleet.system(profile, is_local=is_local).client
    reference, vocabulary = fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary
    wait_idle(client)
    before = scrape(client)
    ledger = Ledger()
    jobs = [partial(ask, client, ids, settings(index), NUM_TOKENS) for index, ids in enumerate(batch)]
    for limit in (16, 1):
        for index, answer in enumerate(at_once(jobs, limit=limit)):
            output = vocabulary.ids_of(answer)
            assert len(output) == NUM_TOKENS
            where = f"{profile.name}, prompt {index}, {limit} at once"
            check_sampled(reference, batch[index], output, settings(index), ledger, where)
    ledger.check_share()
    wait_idle(client)
    preemptions = rise(before, scrape(client), telemetry.PREEMPTIONS)
    assert (preemptions > 0) == (profile is PREEMPTING)
    kind = "one process" if is_local else "Ray"
    report("c", f"{profile.name}, {kind}, 16 at once (cold) and alone (cached)", ledger)


def test_samples_of_one_request(fleet: Fleet, batch: list[list[int]], report: Report) -> None:
    reference, vocabulary, ledger = (
        fleet.models.reference(fleet.models.bundled),
        fleet.models.vocabulary,
        Ledger(),
    )
    client = fleet.system(profiles.SPLIT).client
    for index in (3, 5, 8):
        answers = client.answer_all(
            COMPLETIONS,
            prompt=batch[index],
            n=4,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            skip_special_tokens=False,
            logprobs=0,
            **settings(index).body(),
        )
        assert len({answer.text for answer in answers}) == 4
        for answer in answers:
            output = vocabulary.ids_of(answer)
            where = f"prompt {index}, sample {answer.index}"
            check_sampled(reference, batch[index], output, settings(index), ledger, where, answer.index)
    ledger.check_share()
    report("c", "n = 4, samples differ and are their own draws", ledger)


def exact_distribution(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    """Softmax at the temperature, cut to the smallest nucleus of mass `top_p`, renormalised; in float64."""
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    cumulative = np.cumsum(probabilities[order])
    kept = order[: int(np.searchsorted(cumulative, top_p)) + 1]
    mass = probabilities[kept].sum()
    return {int(token_id): float(probabilities[token_id] / mass) for token_id in kept}


@pytest.mark.parametrize("text", ["I think that the", "The weather today is"])
def test_twenty_thousand_draws_have_the_exact_distribution(fleet: Fleet, report: Report, text: str) -> None:
    reference = fleet.models.reference(fleet.models.bundled)
    ids = [fleet.models.vocabulary.id_of_text(token) for token in _words(text)]
    logits = torch.from_numpy(reference.logits([*ids, 0], 1))
    expected = exact_distribution(logits[0], 0.9, 0.9)
    assert len(expected) > 10, "too few tokens to say anything"
    counts = dict.fromkeys(expected, 0)
    for start in range(0, NUM_DRAWS, 500):
        rows = [
            SamplingRow(
                SamplingParams(max_tokens=1, seed=seed, temperature=0.9, top_p=0.9),
                seed % 3,
                ids,
                len(ids),
                frozenset(),
            )
            for seed in range(start, start + 500)
        ]
        for drawn in Sampler().sample(logits.expand(500, -1), rows):
            assert drawn.token_id in counts, "a token outside of the nucleus was drawn"
            counts[drawn.token_id] += 1
    frequent = [token_id for token_id, share in expected.items() if share * NUM_DRAWS >= 5]
    seen = [counts[token_id] for token_id in frequent]
    wanted = [expected[token_id] * NUM_DRAWS for token_id in frequent]
    if sum(wanted) < NUM_DRAWS - 5:
        seen.append(NUM_DRAWS - sum(seen))
        wanted.append(NUM_DRAWS - sum(wanted))
    scale = sum(seen) / sum(wanted)
    result = stats.chisquare(seen, [value * scale for value in wanted])
    assert result.pvalue > 0.001, f"chi-square {result.statistic:.1f}, p {result.pvalue:.2g}"
    report(
        "c",
        f"{NUM_DRAWS} draws after {text!r}, {len(expected)} tokens",
        f"chi-square p = {result.pvalue:.3f}",
    )


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]
