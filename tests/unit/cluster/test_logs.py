"""Log lines as JSON: one object each, with the ids that the line is about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from cluster.log_config import LogConfig, LogFormat, LogLevel
from cluster.logs import JsonFormatter, TextFormatter, configure_logging
from core.ids import new_request_id, new_ticket_id


@pytest.fixture
def _root_as_it_was() -> Iterator[None]:
    root, calls = logging.getLogger(), logging.getLogger("router.calls")
    handlers, level, calls_level = root.handlers[:], root.level, calls.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    calls.setLevel(calls_level)


def _record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    logger = logging.Logger("kv_transfer.session")
    return logger.makeRecord(logger.name, logging.WARNING, "file", 1, message, arguments, None, extra=extra)


def test_fields_become_members_beside_time_level_and_logger() -> None:
    told = json.loads(JsonFormatter().format(_record("placed", request_id="r", cost_ms=1.5)))
    assert told.pop("time").endswith("+00:00")
    assert told.pop("pid") > 0
    assert told == {
        "level": "warning",
        "logger": "kv_transfer.session",
        "message": "placed",
        "request_id": "r",
        "cost_ms": 1.5,
    }


def test_ids_that_a_message_only_mentions_become_members() -> None:
    ticket, request = new_ticket_id(), new_request_id("chatcmpl")
    told = json.loads(JsonFormatter().format(_record("ticket %s of %s-0 expired", ticket, request)))
    assert (told["ticket_id"], told["request_id"]) == (ticket, f"{request}-0")


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = _record("it\nfailed")
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: two" in json.loads(line)["exception"]


def test_text_shows_the_fields_too() -> None:
    assert TextFormatter().format(_record("placed", request_id="r")).endswith("placed (request_id=r)")


@pytest.mark.usefixtures("_root_as_it_was")
def test_lines_of_calls_are_written_only_where_they_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for calls in (False, True):
        configure_logging(LogConfig(LogFormat.JSON, calls=calls), LogLevel.WARNING)
        logging.getLogger("router.calls").info("ended")
        logging.getLogger("router.endpoint").info("chatter")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["ended"]
