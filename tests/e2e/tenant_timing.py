"""What a tenant learns from time: prompts that another tenant has sent, guessed, beside prompts nobody sent.

Owns the experiment and its statistics; the same whether prefixes are shared or not. A sample is the fastest
of a few prompts of its kind: whoever attacks takes that as well, since other work only ever adds to a time.
The prompts of both kinds are sent in random order, so that slow stretches of the machine meet both alike.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from scipy import stats

from tests.e2e import prompts
from tests.e2e.client import COMPLETIONS, Client

PROMPTS_PER_SAMPLE = 5


@dataclass(slots=True)
class Timing:
    """Milliseconds to the first token as the client saw them and as the service says, of `b`'s requests."""

    guessed_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    told_guessed_ms: list[float] = field(default_factory=list)
    told_cold_ms: list[float] = field(default_factory=list)
    num_hits: int = 0
    num_samples_hit: int = 0

    @property
    def p_value(self) -> float:
        """Mann-Whitney, two-sided: whether a guess can be told from a cold prompt by its time."""
        return float(stats.mannwhitneyu(self.guessed_ms, self.cold_ms).pvalue)

    @property
    def ratio(self) -> float:
        """Of the medians, guessed over cold."""
        return statistics.median(self.guessed_ms) / statistics.median(self.cold_ms)

    @property
    def told_ratio(self) -> float:
        return statistics.median(self.told_guessed_ms) / statistics.median(self.told_cold_ms)

    def __str__(self) -> str:
        guessed, cold = statistics.median(self.guessed_ms), statistics.median(self.cold_ms)
        return (
            f"n = {len(self.cold_ms)}, {self.num_hits} hits, medians {guessed:.1f} and {cold:.1f} ms, "
            f"ratio {self.ratio:.3f} ({self.told_ratio:.3f} by its own stamps), p = {self.p_value:.2g}"
        )


def measure(a: Client, b: Client, tokenizer: Path, num: int, length: int, seed: int) -> Timing:
    """`num` samples: `a` sends some prompts, then `b` sends these and as many that nobody has sent."""
    chance, timing = random.Random(seed), Timing()
    numbers = itertools.count(seed * 1_000_000)

    def prompts_of_a_sample() -> list[list[int]]:
        return [prompts.random_ids(tokenizer, length, next(numbers)) for _ in range(PROMPTS_PER_SAMPLE)]

    for _ in range(num):
        guesses, colds = prompts_of_a_sample(), prompts_of_a_sample()
        for ids in guesses:
            _send(a, ids)
        order = [(ids, True) for ids in guesses] + [(ids, False) for ids in colds]
        chance.shuffle(order)
        sent = [(is_guess, *_send(b, ids)) for ids, is_guess in order]
        timing.guessed_ms.append(min(ms for is_guess, ms, _, _ in sent if is_guess))
        timing.cold_ms.append(min(ms for is_guess, ms, _, _ in sent if not is_guess))
        timing.told_guessed_ms.append(min(told for is_guess, _, told, _ in sent if is_guess))
        timing.told_cold_ms.append(min(told for is_guess, _, told, _ in sent if not is_guess))
        num_hits = sum(num_cached > 0 for _, _, _, num_cached in sent)
        timing.num_hits += num_hits
        timing.num_samples_hit += num_hits > 0
    return timing


def _send(client: Client, ids: list[int]) -> tuple[float, float, int]:
    """Milliseconds here, by the service's stamps, and cached tokens."""
    start = time.perf_counter()
    response = client.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1, "temperature": 0})
    ms = (time.perf_counter() - start) * 1e3
    assert response.status == 200, response.body
    usage = response.json()["usage"]
    (told,) = usage["baton"]["prompts"]
    return ms, told["ttft_ms"]["total"], usage["prompt_tokens_details"]["cached_tokens"]
