"""What a tenant learns from time: prompts that another tenant has sent, guessed, beside prompts nobody sent.

Owns the experiment and its statistics; the same whether prefixes are shared or not.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from scipy import stats

from tests.e2e import prompts
from tests.e2e.client import COMPLETIONS, Client


@dataclass(slots=True)
class Timing:
    """Milliseconds to the first token as the client saw them and as the service says, of `b`'s requests."""

    guessed_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    told_guessed_ms: list[float] = field(default_factory=list)
    told_cold_ms: list[float] = field(default_factory=list)
    num_hits: int = 0

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
    """`num` times: `a` sends a prompt, then `b` sends it and one that nobody has sent, in random order."""
    chance, timing = random.Random(seed), Timing()
    for turn in range(num):
        guess, cold = (prompts.random_ids(tokenizer, length, seed * 10_000 + 2 * turn + i) for i in (0, 1))
        _send(a, guess)
        order = [(guess, True), (cold, False)]
        chance.shuffle(order)
        for ids, is_guess in order:
            ms, told_ms, num_cached = _send(b, ids)
            (timing.guessed_ms if is_guess else timing.cold_ms).append(ms)
            (timing.told_guessed_ms if is_guess else timing.told_cold_ms).append(told_ms)
            timing.num_hits += num_cached > 0
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
