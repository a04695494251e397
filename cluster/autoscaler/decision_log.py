"""DecisionLog: each decision as a line of JSON, and the reading of those files.

Owns the shape of a line, and rotation. Each file begins with a line that tells configuration and state, so
that it can be replayed by itself. Whoever writes does so on one thread of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision import Decision, State
from cluster.autoscaler.load import Load
from core.config import from_mapping
from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a file: what the decisions after it rest on."""

    config: AutoscalingConfig
    state: State


@dataclass(frozen=True, slots=True)
class DecisionEvent:
    """One decision. `time` is the wall's, `now` the clock that decisions go by; `inputs`, what was decided
    from; `applied_prefill` and `applied_decode`: replicas that Serve then aimed at.
    """

    time: float
    now: float
    inputs: Load
    decision: Decision
    applied_prefill: int
    applied_decode: int


class DecisionLog:
    """Writes to `path`; older files are `path.1`, `path.2`, …"""

    def __init__(self, path: Path, config: AutoscalingConfig) -> None:
        self._path = path
        self._config = config
        self._file: BinaryIO | None = None

    def write(self, event: DecisionEvent, state: State) -> None:
        """`state`: before the decision. Raises OSError."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._rotate()
            self._begin(state)
        elif self._file.tell() > self._config.max_log_bytes:
            # a rotation that fails is tried again with the next decision
            self.close()
            self._rotate()
            self._begin(state)
        assert self._file is not None
        self._file.write(_line(event))
        self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self, state: State) -> None:
        self._file = self._path.open("wb")
        self._file.write(_line(Start(self._config, state)))

    def _rotate(self) -> None:
        for number in range(self._config.num_log_files - 1, 0, -1):
            newer = self._path if number == 1 else _numbered(self._path, number - 1)
            if newer.exists():
                newer.replace(_numbered(self._path, number))


def read_decisions(path: Path) -> Iterator[Start | DecisionEvent]:
    """The lines of one file, in order. A last line that was cut off is left out. Raises InvalidConfig naming
    file and line for one that is none of ours.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                values = orjson.loads(line)
                kind: type[Start | DecisionEvent] = Start if "state" in values else DecisionEvent
                yield from_mapping(kind, values)
            except (orjson.JSONDecodeError, InvalidConfig, TypeError) as error:
                message = f"{path}, line {number}, is no decision: {error}"
                raise InvalidConfig(message, key=str(path)) from error


def plain(value: Any) -> Any:
    """Values of ours as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _line(value: Start | DecisionEvent) -> bytes:
    return orjson.dumps(plain(value)) + b"\n"


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
