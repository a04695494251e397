"""How log lines look, and which are written: `configure_logging` once in each process, at its start.

Owns the JSON form. Fields given by `extra=` become members of the object; ids of requests and tickets that a
message only mentions are recognised by their form and become members, too. Lines go to standard error, from
any thread.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from cluster.log_config import LogConfig, LogFormat, LogLevel

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CALLS = "router.calls"
_TICKET = re.compile(r"\b[0-9a-f]{32}\b")
_REQUEST = re.compile(r"\b(?:chat)?cmpl-[0-9a-f]{24}(?:-\d+)?\b")
# what every record has: whatever else is in it was given by `extra=`
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message, pid, then what is known of the matter."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            "pid": record.process,
        }
        for name, form in (("request_id", _REQUEST), ("ticket_id", _TICKET)):
            if mentioned := form.search(message):
                found[name] = mentioned.group()
        found |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The usual line, with what was given by `extra=` behind it."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _USUAL)
        line = super().formatMessage(record)
        return f"{line} ({extra})" if extra else line


def configure_logging(config: LogConfig, usual: LogLevel = LogLevel.INFO) -> None:
    """Replace what the root logger writes to; `usual` is the level where none is configured."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=(config.level or usual).value.upper(), handlers=[handler], force=True)
    logging.getLogger(_CALLS).setLevel(logging.INFO if config.calls else logging.WARNING)
