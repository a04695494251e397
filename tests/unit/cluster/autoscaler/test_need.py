"""What a load needs, in workers: the formulas with numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.load import Load, RouterLoad
from cluster.autoscaler.need import Cause, Measured, Need, decode_need, need_of, prefill_need
from core.ids import Role
from tests.unit.cluster.autoscaler.loads import QUIET, load_of, pair, worker

CONFIG = AutoscalingConfig(target_ttft_s=1.0, target_itl_s=0.1)


def prefill(load: Load, lead_s: float = 1.0) -> Need:
    return prefill_need(load, Measured().after(load), CONFIG, lead_s)


def decode(load: Load, lead_s: float = 1.0) -> Need:
    return decode_need(load, Measured().after(load), CONFIG, lead_s)


def test_a_queue_is_to_be_gone_within_the_time_to_first_token() -> None:
    waiting = replace(QUIET, num_open=8, num_waiting=8, num_waiting_tokens=4000)
    need = prefill(pair(waiting))
    # of 4,000 tokens the worker reads 1,000 until then; 3,000 are to be read in another second
    assert (need.num_workers, need.cause) == (pytest.approx(3.0), Cause.QUEUE)


def test_what_is_cached_need_not_be_read() -> None:
    waiting = replace(QUIET, num_open=8, num_waiting=8, num_waiting_tokens=4000, cached_share=0.5)
    assert prefill(pair(waiting)).num_workers == pytest.approx(1.0)


def test_a_queue_that_is_read_before_help_could_come_needs_none() -> None:
    waiting = replace(QUIET, num_open=8, num_waiting=8, num_waiting_tokens=4000)
    assert prefill(pair(waiting), lead_s=10.0).num_workers == pytest.approx(0.0, abs=0.01)


def test_arrivals_need_what_reads_them_with_room_to_spare() -> None:
    coming = replace(QUIET, arrivals_per_s=2.0, tokens_per_s=1600.0)
    busy = load_of(worker("p", Role.PREFILL), worker("q", Role.PREFILL), router=coming)
    assert prefill(busy).num_workers == pytest.approx(2.0)


def test_one_long_prompt_is_no_reason_for_two_workers() -> None:
    coming = replace(QUIET, num_open=1, arrivals_per_s=0.1, tokens_per_s=500.0)
    load = load_of(worker("p", Role.PREFILL, num_running=1, num_running_tokens=5000), router=coming)
    need = prefill(load)
    assert need.num_workers is not None
    assert need.num_workers < 1.6
    assert not need.is_target_reachable


def test_a_target_between_tokens_that_one_stream_misses_moves_nothing() -> None:
    slow = pair(replace(QUIET, num_open=1), num_running=1, step_base_s=0.3)
    need = decode(slow)
    assert need.num_workers is not None
    assert need.num_workers < 0.1
    assert not need.is_target_reachable


def test_streams_beyond_the_target_between_tokens_need_more_workers() -> None:
    # 40 streams make steps of 0.1 s
    need = decode(pair(replace(QUIET, num_open=60), num_running=60, max_num_seqs=500))
    assert (need.num_workers, need.cause) == (pytest.approx(1.5), Cause.ITL)


def test_kv_needs_workers_with_an_empty_queue() -> None:
    need = decode(pair(replace(QUIET, num_open=8), num_running=8, num_held_tokens=8000))
    assert (need.num_workers, need.cause) == (pytest.approx(8000 / 7500), Cause.KV)


def test_a_rate_of_tokens_needs_the_same_whoever_serves_it() -> None:
    coming = RouterLoad(10, 0, 0, 4.0, 400.0, num_output_tokens=150.0, itl_s=0.05)
    few = pair(coming, num_running=20)
    many = load_of(*(worker(f"d{i}", Role.DECODE) for i in range(4)), router=coming)
    # 40 streams at 0.1 s are 400 tokens a second of a worker; asked are 600
    assert decode(few).num_workers == decode(many).num_workers == pytest.approx(1.5)


def test_what_an_idle_worker_measured_once_does_not_count_beside_one_that_works() -> None:
    slow = worker("d1", Role.DECODE, step_base_s=0.2)
    quick = worker("d2", Role.DECODE, num_running=1)
    assert Measured().after(load_of(slow, quick)).step_base_s == 0.02
    assert Measured().after(load_of(slow)).step_base_s == 0.2, "nobody knows better"


def test_what_is_left_of_another_time_does_not_count_against_what_was_known_since() -> None:
    """The worker that stays when a pool shrinks measured nothing since others had the machine: its streams
    seem to be all that a step costs.
    """
    known = Measured().after(pair(num_running=3))
    idle = pair(step_base_s=None, step_stream_s=0.06)
    assert (known.after(idle).step_base_s, known.after(idle).step_stream_s) == (0.02, 0.002)
    # nor when the next stream comes to it
    resumed = pair(num_running=1, step_base_s=None, step_stream_s=0.06)
    assert known.after(resumed).step_stream_s == 0.002
    coming = RouterLoad(1, 0, 0, 0.5, 25.0, num_output_tokens=600.0, itl_s=0.022)
    need = decode_need(replace(resumed, router=coming), known.after(resumed), CONFIG, 1.0)
    assert need.num_workers is not None
    assert need.num_workers < 1.0
    # as soon as it has measured both parts itself, these count
    news = pair(num_running=1, step_base_s=0.03, step_stream_s=0.004)
    assert (known.after(news).step_base_s, known.after(news).step_stream_s) == (0.03, 0.004)


def test_what_waits_for_room_in_decode_is_decodes_need() -> None:
    waiting = replace(QUIET, num_open=90, num_waiting=40, num_waiting_tokens=8000)
    full = pair(waiting, num_running=50, num_held_tokens=9500)
    assert prefill(full).num_workers == 0.0
    assert (decode(full).num_workers or 0.0) > 2.0


def test_unknown_is_not_nothing() -> None:
    assert prefill(pair(None)).num_workers is None
    assert decode(pair(None)).num_workers is None


def test_something_asked_of_workers_never_measured_needs_one() -> None:
    asked = replace(QUIET, num_open=1, num_waiting=1, num_waiting_tokens=10)
    assert (prefill(load_of(router=asked)).num_workers, decode(load_of(router=asked)).num_workers) == (
        1.0,
        pytest.approx(0.001),
    )


def test_what_was_counted_from_little_is_uncertain() -> None:
    few = replace(QUIET, arrivals_per_s=1.6, tokens_per_s=1600.0, num_arrived=16)
    load = pair(few)
    need = need_of(Role.PREFILL, load, Measured().after(load), CONFIG, 1.0)
    assert need.num_workers is not None
    assert need.num_at_most is not None
    assert need.num_workers < 2.0 < need.num_at_most


def test_growth_is_looked_ahead() -> None:
    coming = replace(QUIET, arrivals_per_s=1.0, tokens_per_s=800.0, growth_per_s=0.02)
    assert prefill(pair(coming), 0.001).num_workers == pytest.approx(1.0, abs=0.01)
    ahead = prefill(pair(coming), lead_s=30.0).num_workers
    assert ahead is not None
    assert ahead > 1.6


def test_what_flows_is_told_apart_from_what_waits() -> None:
    # as much as one worker should read, and a queue
    coming = replace(QUIET, num_open=40, arrivals_per_s=4.0, tokens_per_s=800.0, num_output_tokens=10.0)
    waiting = replace(coming, num_waiting=30, num_waiting_tokens=6000)
    assert prefill(pair(waiting)).num_flowing == pytest.approx(1.0)
    # decode is full: 9,000 tokens of the 7,500 that should be used
    full = pair(waiting, num_running=10, num_held_tokens=9000)
    need = decode(full)
    assert need.num_flowing == pytest.approx(1.2)
    assert (need.num_workers, need.cause) == (pytest.approx(2.0), Cause.KV)
