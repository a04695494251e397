"""What follows from the answers of a running service."""

from __future__ import annotations

import pytest

from cluster.loadtest.record import Outcome, RequestRecord
from cluster.simulator.fit import Measured
from cluster.simulator.served_calibration import (
    Read,
    features_behind,
    features_of_prompt,
    front_of,
    num_while_read,
    pace_of,
    typical,
)


def record(*times: float) -> RequestRecord:
    return RequestRecord(0, 0.0, 0.0, times[-1], Outcome.COMPLETED, times)


def test_what_is_typical_is_the_mean_of_what_nobody_disturbed() -> None:
    assert typical([0.010, 0.012, 0.014]) == pytest.approx(0.012)
    assert typical([0.010, 0.012, 0.050]) == pytest.approx(0.011)


def test_a_prompts_features_are_those_of_its_steps() -> None:
    assert features_of_prompt(300, 512) == (1.0, 300.0, 300 * 150.0, 0.0, 0.0)
    # pairs do not depend on where a prompt is cut
    assert features_of_prompt(1000, 512) == (2.0, 1000.0, 1000 * 500.0, 0.0, 0.0)
    # and each of its tokens attends to those that are cached, too
    assert features_behind(100, 512, 512) == (1.0, 100.0, 100 * (512 + 50.0), 0.0, 0.0)


def test_a_pace_is_told_by_tokens_in_the_time_that_all_stream() -> None:
    slow = [0.0, *(1.0 + 0.1 * i for i in range(20))]
    # two at a time: the pauses between are 0 and 0.2
    pairs = [0.0, *(1.0 + 0.2 * (i // 2) for i in range(20))]
    assert pace_of([record(*slow), record(*slow)]) == pytest.approx(0.1)
    found = pace_of([record(*slow), record(*pairs)])
    assert found == pytest.approx(0.1, rel=0.1)
    assert pace_of([record(0.0, 0.1, 0.2), record(5.0, 5.1, 5.2)]) is None


def test_what_prompts_wait_for_besides_steps_is_the_routers() -> None:
    reads = [
        Read(num, Measured(features_of_prompt(num, 512), 0.1), 0.011 + 1e-5 * num) for num in (16, 256, 1024)
    ]
    front = front_of(reads, message_s=0.0005)
    assert front.request_s == pytest.approx(0.010)
    assert front.token_s == pytest.approx(1e-5)
    falling = [
        Read(num, read.measured, 0.02 - 1e-6 * num) for num, read in zip((16, 256), reads, strict=False)
    ]
    assert front_of(falling, 0.0).token_s == 0.0


def test_streams_are_long_enough_to_run_beside_the_last_one_whose_prompt_is_read() -> None:
    reads = [Read(num, Measured(features_of_prompt(num, 512), num / 1000), 0.0) for num in (100, 500)]
    assert num_while_read(reads, 300, 1, 0.01) == 0
    # three more prompts of 0.3 s, twice as long beside streams, are 180 steps of 10 ms
    assert num_while_read(reads, 300, 4, 0.01) == pytest.approx(180, abs=1)
