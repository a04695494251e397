"""UsageLog: one line of JSON for each call, for billing: who, when, how many tokens. Never any content.

Owns the file and the thread that appends to it; whole lines only, so several routers may share a file. A line
that cannot be written is counted, and the calls go on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import orjson

from core.errors import InvalidConfig

_MAX_WAITING = 100_000

_log = logging.getLogger(__name__)


class UsageLog:
    """`note` from the event loop, `close` at the end. `on_lost` is told how many lines were lost."""

    def __init__(self, path: Path, on_lost: Callable[[int], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        except OSError as error:
            key = "router.tenants.usage_file"
            raise InvalidConfig(f"{key}: {path} cannot be written: {error.strerror}", key=key) from error
        self._path = path
        self._on_lost = on_lost
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._append, name="usage", daemon=True)
        self._thread.start()

    def note(self, record: dict[str, str | int | float]) -> None:
        """Append the record, soon."""
        try:
            self._lines.put_nowait(orjson.dumps(record) + b"\n")
        except queue.Full:
            self._on_lost(1)

    def close(self) -> None:
        """Write what waits, and end."""
        self._lines.put(None)
        self._thread.join()
        os.close(self._file)

    def _append(self) -> None:
        while (line := self._lines.get()) is not None:
            lines = [line]
            is_last = False
            while len(lines) < 1000 and not self._lines.empty():
                following = self._lines.get()
                if following is None:
                    is_last = True
                    break
                lines.append(following)
            self._write(lines)
            if is_last:
                return

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        try:
            num_written = os.write(self._file, data)
        except OSError as error:
            _log.error("usage of %d calls is lost: %s: %s", len(lines), self._path, error.strerror)
            self._on_lost(len(lines))
            return
        if num_written < len(data):
            _log.error("usage is cut short: %s", self._path)
            self._on_lost(data[num_written:].count(b"\n"))
