"""Acceptance: right tokens and seeded draws for each of the CPU's operators and each way between workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest

from core import telemetry
from tests.e2e import prompts
from tests.e2e.client import at_once
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.reference import Ledger
from tests.e2e.right_tokens import Comparison, full_set, is_cold
from tests.e2e.scrape import Scrape, rise, scrape, wait_idle
from tests.e2e.seeded import Settings, ask, check_sampled
from tests.e2e.split import SplitSystem

pytestmark = pytest.mark.timeout(1200)

OPERATORS = ("native", "torch")
BRIDGES = {
    "shm": {"distributed": "never"},
    "distributed": {"shm": "never", "distributed": "required"},
    "grpc": {"shm": "never", "distributed": "never"},
}
SEEDED_LENGTHS = [1, 15, 16, 17, 33, 64, 128, 150, 256, 300]
NUM_TOKENS = 48


@pytest.fixture(scope="module", params=product(OPERATORS, BRIDGES), ids=lambda way: "-".join(way))
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Operators of both workers; the label of payloads' metrics."""
    operators, transport = request.param
    return operators, transport


@pytest.fixture(scope="module")
def split(
    fleet: Fleet, way: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SplitSystem]:
    operators, transport = way
    settings = {
        "engine": {"cpu_kernels": operators},
        "router": {"plan": "remote"},
        "prefill": {"bridge": BRIDGES[transport]},
    }
    with SplitSystem(fleet.models.bundled, settings, tmp_path_factory.mktemp("split")) as system:
        yield system


def check_way(split: SplitSystem, before: Scrape, transport: str) -> None:
    """All payload since `before` went that way."""
    wait_idle(split.client)
    after = scrape(split.client)
    sent = rise(before, after, telemetry.KV_TRANSFER_BYTES)
    assert rise(before, after, telemetry.KV_TRANSFER_BYTES, transport=transport) == sent > 0
    assert rise(before, after, telemetry.KV_TRANSFER_FALLBACKS) == 0


def test_forty_prompts_equal_the_reference(
    fleet: Fleet, split: SplitSystem, way: tuple[str, str], report: Report
) -> None:
    operators, transport = way
    bundled = fleet.models.bundled
    comparison = Comparison(fleet.models.reference(bundled), fleet.models.vocabulary)
    wait_idle(split.client)
    before = scrape(split.client)
    where = f"{operators} operators, {transport}"
    ledger = comparison.run(split.client, full_set(bundled), where, at_a_time=4, is_cached=is_cold)
    check_way(split, before, transport)
    report("b", where, ledger)


def test_seeded_samples_are_their_own_draws_alone_and_together(
    fleet: Fleet, split: SplitSystem, way: tuple[str, str], report: Report
) -> None:
    operators, transport = way
    reference, vocabulary = fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary
    batch = prompts.prompts_of_lengths(fleet.models.bundled, SEEDED_LENGTHS, seed=92)
    jobs = [partial(ask, split.client, ids, settings(index), NUM_TOKENS) for index, ids in enumerate(batch)]
    wait_idle(split.client)
    before, ledger = scrape(split.client), Ledger()
    for limit in (len(batch), 1):
        for index, answer in enumerate(at_once(jobs, limit=limit)):
            output = vocabulary.ids_of(answer)
            assert len(output) == NUM_TOKENS
            where = f"{operators}, {transport}, prompt {index}, {limit} at once"
            check_sampled(reference, batch[index], output, settings(index), ledger, where)
    ledger.check_share()
    check_way(split, before, transport)
    report("c", f"{operators} operators, {transport}", ledger)


def settings(index: int) -> Settings:
    return Settings(0.9, 0.9, seed=3000 + index)
