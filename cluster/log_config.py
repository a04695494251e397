"""LogConfig: the section `logging` of the configuration. Owns its defaults; values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LogFormat(StrEnum):
    """`TEXT`: a line for people. `JSON`: an object on each line, with the ids it is about."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`level` None: info in the processes of a cluster, whose lines go to Ray's files; warning in one
    process, whose lines go to the terminal. `calls`: a line for each placement and for each call that has
    ended; never what was said.
    """

    format: LogFormat = LogFormat.TEXT
    level: LogLevel | None = None
    calls: bool = False
