"""What a service says of itself meanwhile: `/ready`, `/health` and `/v1/models`, asked again and again.

Owns the thread that asks and what it heard. Used from the test's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from tests.e2e import wire
from tests.e2e.harness import System
from tests.e2e.scrape import wait_until


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of `/ready`."""

    at: float
    status: int
    degraded: tuple[str, ...]
    body: bytes


@dataclass
class Readiness:
    """All answers of `/ready`, oldest first, and those of the other pages that were not 200."""

    said: list[Said] = field(default_factory=list)
    others: list[tuple[str, int]] = field(default_factory=list)

    @property
    def refusals(self) -> list[bytes]:
        return [one.body for one in self.said if one.status != 200]

    @property
    def degraded(self) -> list[tuple[str, ...]]:
        """What was missing, one after the other."""
        return [missing for missing, _ in groupby(one.degraded for one in self.said)]

    def first(self, status: int, since: float, timeout_s: float) -> Said:
        """Wait until `/ready` has said `status` after `since`."""

        def found() -> list[Said]:
            return [one for one in list(self.said) if one.at >= since and one.status == status]

        wait_until(lambda: "" if found() else f"/ready does not say {status}: {self.said[-1:]}", timeout_s)
        return found()[0]


@contextmanager
def watching_readiness(system: System) -> Iterator[Readiness]:
    seen, is_over = Readiness(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            asked_at = time.monotonic()
            response = wire.request(system.port, "GET", "/ready")
            missing = tuple(response.json()["degraded"])
            seen.said.append(Said(asked_at, response.status, missing, response.body))
            for page in ("/health", "/v1/models"):
                if (status := wire.request(system.port, "GET", page).status) != 200:
                    seen.others.append((page, status))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
