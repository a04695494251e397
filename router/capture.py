"""Captures: what was asked and answered by calls that went wrong, redacted, in a directory of its own.

Owns which calls are kept, what is taken out of them, and that only the owner can read them. The only place
where content is written down, and only where it was switched on. Decides on the event loop; redacts and
writes on a thread of its own.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from core.errors import InvalidConfig
from router.capture_config import CaptureConfig
from router.metrics import Outcome

_REDACTED = "[redacted]"
# beyond that, those that come are dropped: a disk that hangs must not fill the memory
_MAX_WAITING = 64

_log = logging.getLogger(__name__)


class Captures:
    """One per router. Raises InvalidConfig if the directory cannot be used or others can enter it."""

    def __init__(self, config: CaptureConfig, directory: Path, chance: random.Random) -> None:
        self._config = config
        self._directory = directory
        self._chance = chance
        self._patterns = [re.compile(pattern) for pattern in config.redact]
        self._num_files = _prepare(directory)
        self._places = threading.BoundedSemaphore(_MAX_WAITING)
        self._has_warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")

    def reason(self, outcome: Outcome, ttft_s: float | None, seconds: float) -> str | None:
        """Why a call that has ended is to be kept; None: it is not."""
        config = self._config
        if outcome is Outcome.FAILED:
            found = "failed"
        elif outcome is not Outcome.SUCCEEDED:
            return None  # refused, or its client has gone
        elif config.ttft_slo_s is not None and ttft_s is not None and ttft_s > config.ttft_slo_s:
            found = "ttft"
        elif config.e2e_slo_s is not None and seconds > config.e2e_slo_s:
            found = "e2e"
        else:
            return None
        return found if self._chance.random() < config.sample_ratio else None

    def keep(self, name: str, facts: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Write both to a file of that name, sometime, `content` redacted. Dropped if there are too many."""
        if self._num_files >= self._config.max_files or not self._places.acquire(blocking=False):
            if not self._has_warned:
                _log.warning("calls that went wrong are not captured: %s is full or slow", self._directory)
                self._has_warned = True
            return
        self._num_files += 1
        self._thread.submit(self._write, name, facts, content)

    def close(self) -> None:
        """Write what waits; blocks until it is written."""
        self._thread.shutdown()

    def _write(self, name: str, facts: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        try:
            path = self._directory / f"{name}.json"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(orjson.dumps({**facts, **self._redacted(content)}, option=orjson.OPT_INDENT_2))
        except Exception:  # noqa: BLE001 - logged; the call was answered long ago
            _log.exception("a call that went wrong could not be captured")
        finally:
            self._places.release()

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(_REDACTED, value)
            return value[: self._config.max_chars]
        if isinstance(value, Mapping):
            return {key: self._redacted(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._redacted(item) for item in value]
        return value


def captures_of(config: CaptureConfig, chance: random.Random) -> Captures | None:
    """As configured; None: nothing is kept."""
    return None if config.directory is None else Captures(config, config.directory, chance)


def _prepare(directory: Path) -> int:
    """Make the directory if it is not there; how many files it holds."""
    key = "router.capture.directory"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat().st_mode
        found = sum(1 for path in directory.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise InvalidConfig(f"{key}: cannot use {directory}: {error.strerror}", key=key) from error
    if mode & 0o077:
        raise InvalidConfig(f"{key}: other users can enter {directory}; `chmod 700` it", key=key)
    return found
