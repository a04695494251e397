"""Waste: the share of held KV slots in which nothing is computed, from the two counters of the engine.

Owns the load that is measured: streams whose contexts are 400 tokens or more on average.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from core import telemetry
from tests.e2e import prompts
from tests.e2e.client import at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.scrape import rise, scrape, wait_idle

NUM_STREAMS = 32
MAX_WASTE = 0.04


@dataclass(frozen=True, slots=True)
class Waste:
    """`share` of slots held in vain, `mean_context` tokens per stream, both as time averages of decode."""

    share: float
    mean_context: float

    def __str__(self) -> str:
        return f"waste {100 * self.share:.2f} %, mean context {self.mean_context:.0f} tokens"


def measure_waste(fleet: Fleet, system: System, num_tokens: int) -> Waste:
    """32 streams at once, prompts of 300 to 600 ids, `num_tokens` out."""
    client = system.client
    generator = random.Random(32)
    lengths = [generator.randint(300, 600) for _ in range(NUM_STREAMS)]
    batch = prompts.prompts_of_lengths(fleet.models.bundled, lengths, seed=32)
    wait_idle(client)
    before = scrape(client)
    at_once(
        [
            partial(client.stream_completion, ids, max_tokens=num_tokens, ignore_eos=True, temperature=0)
            for ids in batch
        ]
    )
    wait_idle(client)
    after = scrape(client)
    held = rise(before, after, telemetry.KV_SLOT_TOKENS, kind="held", role="decode")
    computed = rise(before, after, telemetry.KV_SLOT_TOKENS, kind="computed", role="decode")
    assert held > 0, "nothing was held"
    return Waste(1 - computed / held, sum(lengths) / NUM_STREAMS + num_tokens / 2)
