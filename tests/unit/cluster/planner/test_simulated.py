"""Counts by simulation: enough workers for the targets, and not one that is not missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.planner.capacity import Capacity, Shares
from cluster.planner.hardware import Catalogue
from cluster.planner.model_config import model_shape
from cluster.planner.plan import Targets, Workload
from cluster.planner.simulated import SimulatedSearch, Trial, prices_of, requests_of
from cluster.simulator.workload import prompt_tokens
from tests.unit.cluster.planner.model_configs import LLAMA_3_70B, MIXTRAL_8X7B

_CATALOGUE = Catalogue()
_WORKER = Capacity(model_shape(LLAMA_3_70B, "llama"), _CATALOGUE.gpu("h100"), 4, Shares())
_TARGETS = Targets(ttft_s=1.0, itl_s=0.05)
_WORKLOAD = Workload(isl=2048, osl=64, rate=1.0)


def _search(rate: float, trials: list[Trial]) -> SimulatedSearch:
    return SimulatedSearch(
        _WORKER, replace(_WORKLOAD, rate=rate), _TARGETS, _CATALOGUE.link("ib-ndr"), 40, trials.append
    )


def test_prices_of_a_step_are_those_of_the_roofline() -> None:
    price = prices_of(_WORKER, 64)
    assert price.fixed_s + 2048 * price.kv_s == pytest.approx(_WORKER.decode_step_s(1, 2048), rel=0.01)
    pairs = 4096 * 4097 / 2
    assert 4096 * price.token_s + pairs * price.pair_s == pytest.approx(_WORKER.prefill_s(4096), rel=0.02)


def test_a_batch_of_a_mixture_reads_the_experts_of_all_its_streams() -> None:
    """Two of eight experts for one stream, all of them for 64: three times the bytes."""
    worker = Capacity(model_shape(MIXTRAL_8X7B, "mixtral"), _CATALOGUE.gpu("h100"), 2, Shares())
    price = prices_of(worker, 64)
    step_s = worker.decode_step_s(64, 2048)
    assert step_s > 3 * worker.decode_step_s(1, 0)
    simulated_s = price.fixed_s + 64 * price.stream_s + 64 * 2048 * price.kv_s
    assert step_s <= simulated_s <= 1.1 * step_s + 64 * price.token_s


def test_what_is_cached_of_a_prompt_is_part_of_it() -> None:
    workload = Workload(isl=1000, osl=8, rate=2.0, num_cached=300)
    one, other = (prompt_tokens(item, number) for number, item in enumerate(requests_of(workload, 2, 0)))
    assert len(one) == len(other) == 1000
    assert one[:300] == other[:300]
    assert not set(one[300:]) & set(other)
    alone = [prompt_tokens(item, number) for number, item in enumerate(requests_of(_WORKLOAD, 2, 0))]
    assert [len(set(tokens)) for tokens in alone] == [1, 1]
    assert alone[0][0] != alone[1][0]


def test_the_counts_found_are_enough_and_one_worker_less_of_either_kind_is_not() -> None:
    trials: list[Trial] = []
    search = _search(18.0, trials)
    found = search.disaggregated(1, 1)
    assert found.is_enough
    assert found.num_prefill > 1, (
        "a tenth of a second for each prompt: one does not keep up, with decode's help"
    )
    for less in ((1, 0), (0, 1)):
        prefill, decode = found.num_prefill - less[0], found.num_decode - less[1]
        if prefill > 0 and decode > 0:
            assert not search.trial(prefill, decode).is_enough
    assert len({(trial.num_prefill, trial.num_decode) for trial in trials}) == len(trials), (
        "none is tried twice"
    )
