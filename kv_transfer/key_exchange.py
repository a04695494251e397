"""KeyExchange: what the two ends of a process group tell each other to find each other.

A small table, the same at both ends: what one end sets travels over the pair's own authenticated stream, and
the other one waits for it. So a group needs no rendezvous server that anybody else could ask. Used from any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_MAX_KEYS = 256
_MAX_VALUE_BYTES = 1 << 16


class KeyExchange:
    """`tell` sends a key and its value to the other end; it is called from the thread that sets it."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_ended = False

    def set(self, key: str, value: bytes) -> None:
        """Known here at once, and at the other end soon."""
        self._enter(key, value)
        self._tell(key, value)

    def hear(self, key: str, value: bytes) -> None:
        """The other end has set it. More than a group needs ends the exchange."""
        if len(self._values) >= _MAX_KEYS or len(value) > _MAX_VALUE_BYTES:
            self.end()
            return
        self._enter(key, value)

    def has(self, key: str) -> bool:
        return key in self._values

    def wait(self, key: str, timeout_s: float) -> bytes:
        """The value, when there is one. Raises TimeoutError, or ConnectionError if there will be none."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._is_ended, timeout_s):
                raise TimeoutError(f"the other end of the group did not tell {key!r} in {timeout_s:g} s")
            if key not in self._values:
                raise ConnectionError("the other end of the group is gone")
            return self._values[key]

    def end(self) -> None:
        """Whoever waits is sent away."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _enter(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
