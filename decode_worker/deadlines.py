"""Deadlines: which jobs are overdue, without looking at all of them.

Owns a heap of the deadlines of open jobs. A job that has ended leaves it when its deadline comes, or when the
heap is mostly made of such. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from decode_worker.generation import Generation

_MIN_ENDED = 64


class Deadlines:
    """`is_open` says whether a job still runs."""

    def __init__(self, is_open: Callable[[Generation], bool]) -> None:
        self._is_open = is_open
        self._heap: list[tuple[float, int, Generation]] = []
        self._num_added = 0
        self._max_size = _MIN_ENDED

    def __len__(self) -> int:
        """Entries kept, those of ended jobs included."""
        return len(self._heap)

    def add(self, generation: Generation) -> None:
        self._num_added += 1
        heappush(self._heap, (generation.deadline.at, self._num_added, generation))
        if len(self._heap) > self._max_size:
            self._heap = [entry for entry in self._heap if self._is_open(entry[2])]
            heapify(self._heap)
            self._max_size = 2 * len(self._heap) + _MIN_ENDED

    def take_overdue(self, now: float) -> list[Generation]:
        """Open jobs whose deadline is not after `now` (seconds), earliest first; each is told once."""
        found: list[Generation] = []
        while self._heap and self._heap[0][0] <= now:
            generation = heappop(self._heap)[2]
            if self._is_open(generation):
                found.append(generation)
        return found
