"""Far more than the service can do: what it answers comes in time, the rest is refused in words."""

from __future__ import annotations

from functools import partial

import pytest

from tests.e2e import prompts
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.open_loop import OpenLoop, Shape
from tests.e2e.overload import check_refusals, peak
from tests.e2e.scrape import wait_idle

NARROW = Profile("narrow", {"decode.max_num_seqs": 4})


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_twice_the_capacity_costs_little_goodput_and_every_refusal_is_told(fleet: Fleet) -> None:
    system = fleet.system(NARROW, "toy")
    prompt = partial(prompts.random_ids, fleet.models.bundled, 32)
    load = OpenLoop(system.client, Shape(prompt, max_tokens=150, timeout_s=8.0), seed=9)
    load.run(1.0, 4.0, 0.0)  # warm
    best = peak(load, 1.0, 7.0, 3.0, growth=2.0)
    outcome = load.run(2 * best, 12.0, 3.0)
    wait_idle(system.client)
    check_refusals(outcome, max_late=0.1)
    # the machine is shared with other work: the acceptance run holds to 0.9
    assert outcome.goodput >= 0.6 * best, f"{outcome}, peak {best:.2f}"
