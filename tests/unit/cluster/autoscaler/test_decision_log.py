"""The log of decisions: what is read back decides the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import State
from cluster.autoscaler.decision_log import DecisionEvent, DecisionLog
from cluster.autoscaler.replay import replay_file
from core.errors import InvalidConfig
from core.ids import Role
from tests.unit.cluster.autoscaler.plant import Plant, Traffic

CONFIG = AutoscalingConfig(
    is_enabled=True,
    can_flip=True,
    startup_s=5.0,
    scale_down_delay_s=10.0,
    max_log_bytes=2**16,
    num_log_files=3,
    max_workers=5,
)


def write(path: Path, config: AutoscalingConfig = CONFIG) -> Plant:
    """Three minutes of a plant whose load changes."""
    plant = Plant(config, num_decode=3)
    for per_s in (1.0, 9.0, 0.5):
        plant.traffic = Traffic(per_s)
        plant.run(60)
    log, state = DecisionLog(path, config), State()
    for now, load, decision in plant.decisions:
        targets = [decision.pool(role).num_replicas for role in Role]
        log.write(DecisionEvent(now + 0.25, now, load, decision, *targets), state)
        _, state = decide(load, config, state, now)
    log.close()
    return plant


def test_every_file_of_a_log_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "log" / "decisions.jsonl"
    plant = write(path)
    assert any(decision.flips for _, _, decision in plant.decisions)
    files = sorted(path.parent.iterdir())
    assert len(files) == 3, "it was rotated, and what is old is gone"
    assert all(file.stat().st_size < 2**16 + 10_000 for file in files)
    for file in files:
        replayed = replay_file(file)
        assert replayed.num_decisions > 3
        assert replayed.differences == ()
    last = replay_file(path).events[-1]
    assert (last.now, last.inputs, last.decision) == plant.decisions[-1]


def test_another_configuration_shows_what_it_would_have_done(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    write(path, replace(CONFIG, max_log_bytes=2**24))
    assert replay_file(path, replace(CONFIG, max_prefill_workers=1)).differences


def test_a_line_that_was_cut_off_is_left_out_and_one_that_is_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    write(path, replace(CONFIG, max_log_bytes=2**24))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert replay_file(path).num_decisions == len(whole.splitlines()) - 2
    path.write_bytes(whole + b'{"time": 1}\n')
    with pytest.raises(InvalidConfig, match=rf"line {len(whole.splitlines()) + 1}.*setting now is required"):
        replay_file(path)
    path.write_bytes(whole.split(b"\n", 1)[1])
    with pytest.raises(InvalidConfig, match="does not begin with"):
        replay_file(path)


def test_a_rotation_that_failed_is_done_with_the_next_decision(tmp_path: Path) -> None:
    """As when the disk was full for a moment: the log goes on, and still replays."""
    whole = tmp_path / "whole.jsonl"
    plant = write(whole, replace(CONFIG, max_log_bytes=2**24))
    path, aside = tmp_path / "log" / "decisions.jsonl", tmp_path / "aside"
    log, state, num_failed = DecisionLog(path, CONFIG), State(), 0
    for now, load, decision in plant.decisions:
        targets = [decision.pool(role).num_replicas for role in Role]
        event = DecisionEvent(now + 0.25, now, load, decision, *targets)
        if num_failed == 0 and path.exists() and path.stat().st_size > CONFIG.max_log_bytes:
            path.parent.rename(aside)
            with pytest.raises(FileNotFoundError):
                log.write(event, state)
            aside.rename(path.parent)
            num_failed += 1
        else:
            log.write(event, state)
        _, state = decide(load, CONFIG, state, now)
    log.close()
    assert num_failed == 1
    assert replay_file(path).differences == ()
    assert replay_file(path).events[-1].now == plant.decisions[-1][0]
