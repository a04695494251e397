"""Overload: the most that a service answers in time, and what it does when twice as much is asked of it.

Owns the search for the peak, the watch over the processes' memory, and what must hold. For a short test and
for the acceptance run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

import numpy as np
import psutil

from tests.e2e.harness import System
from tests.e2e.open_loop import OpenLoop, Outcome

_SAMPLE_S = 5.0
_MAX_STEPS = 12


class Memory:
    """Resident bytes of each process of a system, every few seconds inside the `with`."""

    def __init__(self, system: System) -> None:
        self._processes = system.processes()
        self._samples: list[dict[int, int]] = []
        self._names: dict[int, str] = {}
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="memory")

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            sample: dict[int, int] = {}
            for process in self._processes:
                try:
                    sample[process.pid] = process.memory_info().rss
                    self._names.setdefault(process.pid, " ".join(process.cmdline())[:40])
                except psutil.NoSuchProcess:
                    continue
            self._samples.append(sample)

    def growth(self) -> dict[str, float]:
        """By process, MiB: the last quarter's mean less the second quarter's. The first one warms up."""
        quarter = max(1, len(self._samples) // 4)
        early, late = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        pids = set(early[0]) & set(late[-1])
        return {f"{self._names[pid]} ({pid})": (_mean(late, pid) - _mean(early, pid)) / 2**20 for pid in pids}


def _mean(samples: Sequence[dict[int, int]], pid: int) -> float:
    found = [sample[pid] for sample in samples if pid in sample]
    return sum(found) / len(found)


def peak(load: OpenLoop, first_rate: float, step_s: float, settle_s: float, growth: float = 1.6) -> float:
    """Offer more and more until goodput no longer follows, twice in a row, since other work on the machine
    may slow one step: its peak, a second, which is the capacity.
    """
    rate, best, num_short = first_rate, 0.0, 0
    for _ in range(_MAX_STEPS):
        found = load.run(rate, step_s, settle_s).goodput
        best = max(best, found)
        num_short = num_short + 1 if found < 0.75 * rate else 0
        if num_short == 2 and best > 0:
            return best
        rate *= growth
    raise AssertionError(f"no end of capacity was found up to {rate:.0f} requests a second")


def refused_after(outcome: Outcome) -> str:
    """How long those that were refused had to wait for that."""
    seconds = [call.seconds for call in outcome.calls if call.status in (429, 503)]
    if not seconds:
        return "nothing was refused"
    return f"p50 {np.median(seconds):.2f} s, p99 {np.quantile(seconds, 0.99):.2f} s, n = {len(seconds)}"


def check_refusals(outcome: Outcome, max_late: float) -> None:
    """Nothing hung or broke, what was refused was told so by 429 or 503, with Retry-After, and of those that
    were let in at most `max_late` ran out of time (504).
    """
    late = outcome.statuses[504]
    assert late <= max_late * (late + outcome.statuses[200]), outcome.statuses
    refused = [call for call in outcome.calls if call.status not in (200, 504)]
    assert refused, "nothing was refused: that was no overload"
    assert {call.status for call in refused} <= {429, 503}, outcome.statuses
    assert all(call.has_retry_after for call in refused)
