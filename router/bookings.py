"""Bookings: when those that were refused are told to come back, and what is kept for them until then.

Each refused call books the moment at which there will be room for it behind those that were refused before,
so not all come back at once, and newcomers do not take what was promised. Who comes back is known by the call
being the same. What is kept is weighted by how many did come back lately: clients that never do cost the
others nothing for long. Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

# so long after it is due a call may come and find what was kept for it
_GRACE_S = 3.0
_TRUST_STEP = 0.3
_EARLY_S = 0.05
_MIN_TRUST = 0.1
_MAX_ROUNDS = 20
_PROOF = 3


@dataclass(eq=False, slots=True)
class _Booking(Generic[K]):
    call: int
    costs: Mapping[K, int]
    due_at: float
    is_kept: bool
    is_open: bool = True


class Bookings(Generic[K]):
    """`costs` are amounts of what is scarce, by kind."""

    def __init__(self) -> None:
        self.trust = 1.0
        self._num_claimed = 0
        self._by_due: deque[_Booking[K]] = deque()
        self._by_call: dict[int, deque[_Booking[K]]] = {}
        self._booked: dict[K, int] = {}
        self._kept: dict[K, int] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._by_call.values())

    @property
    def share(self) -> float:
        """How many of those that were told to come are reckoned with."""
        return max(_MIN_TRUST, self.trust)

    def kept(self, kind: K, now: float) -> list[tuple[float, float]]:
        """(when, how much) newcomers leave to those that are to come back, in order of time."""
        self._expire(now)
        if not self._kept.get(kind) or self.trust < _MIN_TRUST:
            return []
        return [
            (booking.due_at, self.trust * booking.costs[kind])
            for booking in self._by_due
            if booking.is_open and booking.is_kept
        ]

    def num_kept(self, kind: K) -> int:
        """All that is kept, whenever it is due."""
        return math.ceil(self.trust * self._kept.get(kind, 0)) if self.trust >= _MIN_TRUST else 0

    def ahead(self, kind: K) -> int:
        """How much those that were told to come back may take before the next one that is told."""
        return math.ceil(self.share * self._booked.get(kind, 0))

    def is_due(self, call: int, now: float) -> bool:
        """Whether a call like this one was told to come by now."""
        self._expire(now)
        waiting = self._by_call.get(call)
        return waiting is not None and waiting[0].due_at <= now + _EARLY_S

    def due_by(self, at: float) -> Iterator[tuple[int, float]]:
        """(call, when) of those that are to come by then, in order of time."""
        for booking in self._by_due:
            if booking.due_at > at:
                return
            if booking.is_open:
                yield booking.call, booking.due_at

    def costs_of(self, call: int) -> Mapping[K, int]:
        """What is kept for it, that is due."""
        return self._by_call[call][0].costs

    def claim(self, call: int) -> None:
        """It came, and was let in."""
        self._came(call)
        self._num_claimed += 1

    def book(self, call: int, costs: Mapping[K, int], due_at: float, sizes: Mapping[K, int]) -> bool:
        """It was refused, and told to come at `due_at`, which is not before any earlier booking's. Of each
        kind no more than `sizes` is kept, several times that once some did come back; beyond many times that
        nothing is noted any more. Returns whether it was noted.
        """
        if any(self._booked.get(kind, 0) > _MAX_ROUNDS * size for kind, size in sizes.items()):
            return False
        rounds = 1.0 + (_MAX_ROUNDS * self.trust if self._num_claimed >= _PROOF else 0.0)
        is_kept = all(self._kept.get(kind, 0) + costs[kind] <= rounds * size for kind, size in sizes.items())
        booking = _Booking(call, costs, due_at, is_kept)
        self._by_due.append(booking)
        self._by_call.setdefault(call, deque()).append(booking)
        for kind, cost in costs.items():
            self._booked[kind] = self._booked.get(kind, 0) + cost
            self._kept[kind] = self._kept.get(kind, 0) + (cost if is_kept else 0)
        return True

    def postpone(self, call: int) -> None:
        """It came, and there was no room after all: its booking ends, a new one may follow."""
        self._came(call)

    def _came(self, call: int) -> None:
        self._close(self._by_call[call][0])
        self.trust += _TRUST_STEP * (1.0 - self.trust)

    def _expire(self, now: float) -> None:
        while self._by_due and (not self._by_due[0].is_open or self._by_due[0].due_at + _GRACE_S < now):
            booking = self._by_due.popleft()
            if booking.is_open:
                self._close(booking)
                if booking.is_kept:
                    self.trust -= _TRUST_STEP * self.trust

    def _close(self, booking: _Booking[K]) -> None:
        booking.is_open = False
        same = self._by_call[booking.call]
        same.remove(booking)
        if not same:
            del self._by_call[booking.call]
        for kind, cost in booking.costs.items():
            self._booked[kind] -= cost
            self._kept[kind] -= cost if booking.is_kept else 0
