"""SIGINT and SIGTERM as a request to stop: an exception while something is going on, an event otherwise.

Owns the handlers of both signals. Main thread only.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(Exception):
    """SIGINT or SIGTERM came while something was going on."""


class Stopper:
    """Turns SIGINT and SIGTERM into StopRequested during the start, into an event afterwards, and counts
    them.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._raises = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal interrupts the main thread with StopRequested."""
        self._raises = True
        try:
            if self.requested.is_set():
                raise StopRequested
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # while it starts, Ray's core has its own handler before this one, which would abort after 3 s
        signal.alarm(0)
        self.requested.set()
        if self._raises:
            self._raises = False
            raise StopRequested
