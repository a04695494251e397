"""Replay: decide again what a log tells, and compare.

Owns the walk through a file: the state goes on from its first line through the inputs alone, so an equal
decision is no copy. Pure apart from reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import Decision
from cluster.autoscaler.decision_log import DecisionEvent, Start, read_decisions
from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Difference:
    """A line of the log, and what is decided in its place."""

    event: DecisionEvent
    decision: Decision


@dataclass(frozen=True, slots=True)
class Replayed:
    """`num_decisions` of a log were made again; `differences` are those that came out otherwise."""

    num_decisions: int
    events: tuple[DecisionEvent, ...]
    differences: tuple[Difference, ...]


def replay(lines: Iterable[Start | DecisionEvent], config: AutoscalingConfig | None = None) -> Replayed:
    """With the logged configuration, or with `config`, to see what that would have done. Raises InvalidConfig
    for a log without a beginning.
    """
    start: Start | None = None
    state = None
    events: list[DecisionEvent] = []
    differences: list[Difference] = []
    for line in lines:
        if isinstance(line, Start):
            start, state = line, line.state
            continue
        if start is None or state is None:
            raise InvalidConfig("the log does not begin with configuration and state", key="log")
        decision, state = decide(line.inputs, config or start.config, state, line.now)
        events.append(line)
        if decision != line.decision:
            differences.append(Difference(line, decision))
    return Replayed(len(events), tuple(events), tuple(differences))


def replay_file(path: Path, config: AutoscalingConfig | None = None) -> Replayed:
    """See `replay`."""
    return replay(read_decisions(path), config)
