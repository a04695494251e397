"""Steps that are alike differ as the measured ones did, by a seed, and take their price on the whole."""

from __future__ import annotations

import random
import statistics

import pytest

from cluster.simulator.jitter import Draws, Jitter, spread_of
from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.sequence import new_sequence
from engine.step import ScheduledSequence, StepPlan
from tests.unit.cluster.simulator.world import conversations, played


def test_draws_have_the_spread_that_was_measured_and_the_mean_of_one() -> None:
    chance = random.Random(5)
    measured = [1.2 * chance.lognormvariate(0.0, 0.3) for _ in range(4000)]
    draws = Draws(Jitter(streaming=spread_of(measured)), random.Random(1))
    drawn = sorted(draws.streaming() for _ in range(20_000))
    mean = statistics.fmean(measured)
    measured.sort()
    assert statistics.fmean(drawn) == pytest.approx(1.0, rel=0.01)
    for share in (0.05, 0.5, 0.95, 0.99):
        expected = measured[int(share * len(measured))] / mean
        assert drawn[int(share * len(drawn))] == pytest.approx(expected, rel=0.03)


def test_steps_of_one_prompt_have_a_part_in_common_and_differ() -> None:
    draws = Draws(Jitter(reading=(0.5, 1.5), chunk=(0.9, 1.1)), random.Random(3))
    prompts = [[draws.step(plan) for _ in range(50)] for plan in (reading() for _ in range(200))]
    means = [statistics.fmean(steps) for steps in prompts]
    assert statistics.fmean(means) == pytest.approx(1.0, abs=0.06)
    assert statistics.pstdev(means) == pytest.approx(1.0 / 12**0.5, rel=0.15)
    within = [step / mean for steps, mean in zip(prompts, means, strict=True) for step in steps]
    assert statistics.pstdev(within) == pytest.approx(0.2 / 12**0.5, rel=0.05)


def test_too_few_steps_tell_of_no_spread() -> None:
    assert spread_of([]) == spread_of([1.1]) == ()
    assert Draws(Jitter(), random.Random(1)).streaming() == 1.0


def reading() -> StepPlan:
    """A step of a prompt of its own."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    prompt = new_sequence(Request(RequestId("r"), (1,) * 64, sampling), 0, (), 512)
    return StepPlan((ScheduledSequence(prompt, 32),))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"streaming": (1.1, 0.9)}, "streaming"),
        ({"reading": (-0.1, 2.1)}, "reading"),
        ({"reading": (1.0,)}, "reading"),
        ({"chunk": (0.8, 1.1, 1.0)}, "chunk"),
    ],
)
def test_a_jitter_that_cannot_be_is_named(values: dict[str, tuple[float, ...]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Jitter(**values)


def test_a_simulation_with_jitter_has_other_times_by_its_seed_and_the_same_tokens() -> None:
    arrivals = conversations(30)
    jitter = Jitter(streaming=(0.5, 1.0, 1.5), reading=(0.8, 1.2))
    plain, first, again = played(arrivals), played(arrivals, jitter=jitter), played(arrivals, jitter=jitter)
    assert [r.token_times for r in first.records] == [r.token_times for r in again.records]
    assert [r.token_times for r in first.records] != [r.token_times for r in plain.records]
    assert [len(r.token_times) for r in first.records] == [len(r.token_times) for r in plain.records]
    gaps = [b - a for r in first.records for a, b in zip(r.token_times[1:], r.token_times[2:], strict=False)]
    even = [b - a for r in plain.records for a, b in zip(r.token_times[1:], r.token_times[2:], strict=False)]
    assert statistics.pstdev(gaps) > statistics.pstdev(even)
