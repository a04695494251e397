"""What the engine's series promise to whoever scrapes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef
from core.request import Request, SamplingParams
from core.worker_status import WorkerStatus
from engine.metrics import EngineMetrics
from engine.sequence import Sequence, new_sequence

LABELS = {"role": "decode", "model": "toy"}


def make_status(**changes: Any) -> WorkerStatus:
    idle = WorkerStatus(
        ref=WorkerRef(WorkerId("d"), Role.DECODE, Epoch(1), "loopback:d"),
        is_draining=False,
        num_waiting=0,
        num_running=0,
        num_waiting_tokens=0,
        num_running_tokens=0,
        num_blocks=10,
        num_free_blocks=10,
        num_cached_blocks=0,
        num_held_blocks=0,
        num_quarantined_blocks=0,
        max_num_seqs=4,
    )
    return dataclasses.replace(idle, **changes)


def make_sequence(num_tokens: int, prompt_logprobs: int | None = None, is_read: bool = True) -> Sequence:
    sampling = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=prompt_logprobs)
    request = Request(RequestId("r"), (1,) * num_tokens, sampling, is_prefix_cache_read=is_read)
    return new_sequence(request, 0, (), max_context=100)


class Series:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, Role.DECODE, model="toy")

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {**LABELS, **labels})


def test_gauges_follow_the_status_up_and_down() -> None:
    series = Series()
    busy = {"num_running": 3, "num_waiting": 2, "num_waiting_tokens": 50, "num_held_blocks": 7}
    series.metrics.observe_status(make_status(**busy, num_free_blocks=2, num_quarantined_blocks=1))
    assert series.value("baton_num_running") == 3
    assert series.value("baton_kv_utilization") == pytest.approx(0.8)
    assert series.value("baton_kv_blocks", state="held") == 7
    series.metrics.observe_status(make_status())
    for name in (
        "baton_num_running",
        "baton_num_waiting",
        "baton_num_waiting_tokens",
        "baton_kv_utilization",
    ):
        assert series.value(name) == 0
    assert series.value("baton_kv_blocks", state="free") == 10


def test_a_restart_after_preemption_counts_no_prompt_and_no_hit_again() -> None:
    series = Series()
    sequence = make_sequence(20)
    sequence.num_cached_tokens = 16
    series.metrics.observe_start(sequence)
    sequence.num_preemptions += 1
    series.metrics.observe_start(sequence)
    assert series.value("baton_prompt_tokens_total") == 20
    assert series.value("baton_prefix_query_tokens_total") == 20
    assert series.value("baton_prefix_hit_tokens_total") == 16


@pytest.mark.parametrize("changes", [{"is_read": False}, {"prompt_logprobs": 1}], ids=["off", "logprobs"])
def test_a_prompt_that_may_not_use_the_cache_is_no_query(changes: dict[str, Any]) -> None:
    series = Series()
    series.metrics.observe_start(make_sequence(20, **changes))
    assert series.value("baton_prompt_tokens_total") == 20
    assert series.value("baton_prefix_query_tokens_total") == 0


def test_waste_is_one_minus_computed_over_held_averaged_over_time() -> None:
    series = Series()
    series.metrics.observe_slots(64, 40, now=10.0)
    series.metrics.observe_slots(32, 20, now=12.0)
    series.metrics.observe_slots(0, 0, now=13.0)
    series.metrics.observe_slots(0, 0, now=99.0)
    assert series.value("baton_kv_slot_tokens_total", kind="held") == 2 * 64 + 1 * 32
    assert series.value("baton_kv_slot_tokens_total", kind="computed") == 2 * 40 + 1 * 20


def test_rates_are_those_of_the_last_steps_and_zero_before_the_first() -> None:
    metrics = Series().metrics
    assert (metrics.prefill_tokens_per_s, metrics.step_s) == (0.0, 0.0)
    for _ in range(100):
        metrics.observe_step(1.0, 10)
    for _ in range(100):
        metrics.observe_step(0.5, 50)
    assert metrics.prefill_tokens_per_s == pytest.approx(100.0, rel=0.01)
    assert metrics.step_s == pytest.approx(0.5, rel=0.01)
    for _ in range(5):
        metrics.observe_step(0.01, 0)
    assert metrics.prefill_tokens_per_s == pytest.approx(100.0, rel=0.01), "decode steps do not count"


def test_the_exposition_parses_has_help_and_shows_every_series_before_the_first_event() -> None:
    series = Series()
    families = list(text_string_to_metric_families(generate_latest(series.registry).decode()))
    assert all(family.documentation for family in families)
    samples = {sample.name for family in families for sample in family.samples}
    assert {"baton_preemptions_total", "baton_generated_tokens_total", "baton_kv_leak_difference"} <= samples
    reasons = [
        sample.labels["reason"]
        for family in families
        for sample in family.samples
        if "reason" in sample.labels
    ]
    assert set(reasons) == {"stop", "length", "cancelled", "error", "handed_over"}
