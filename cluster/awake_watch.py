"""AwakeWatch: notices when this process was stopped. Owns the thread that does nothing else."""

from __future__ import annotations

import threading

from core.awake import PERIOD_S, Awake
from core.clock import Clock


class AwakeWatch:
    """Watches from `start` to `close`; `awake` has the account."""

    def __init__(self, clock: Clock) -> None:
        self.awake = Awake(clock)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awake", daemon=True)

    def start(self) -> None:
        self.awake.look()
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice, and without `start`."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.awake.rest()

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self.awake.look()
