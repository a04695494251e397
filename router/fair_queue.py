"""FairQueue: who of those that wait goes next: by priority, and among equals by tenants' weights.

Inside one priority each tenant gets service in proportion to its weight, whatever it sends (start-time fair
queueing: Goyal, Vin, Cheng, SIGCOMM 1996); one tenant's requests keep their order. Whoever waits rises by one
priority every `aging_s`, so no class starves: after `aging_s` × (highest − own) a request is among the
highest, where its early start tag puts it first. Pure; time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """One that waits. `cost` in any unit that is the same for all, here tokens."""

    item: T
    tenant: str
    priority: int
    arrived_at: float
    start_tag: float
    is_waiting: bool = True


@dataclass(eq=False, slots=True)
class _Line(Generic[T]):
    """Those of one tenant and one priority, in order of arrival."""

    entries: deque[Entry[T]] = field(default_factory=deque)

    def head(self) -> Entry[T] | None:
        while self.entries and not self.entries[0].is_waiting:
            self.entries.popleft()
        return self.entries[0] if self.entries else None


class FairQueue(Generic[T]):
    """Priorities are whole numbers up to `max_priority`, higher goes first."""

    def __init__(self, max_priority: int, aging_s: float) -> None:
        assert aging_s > 0
        self._max_priority = max_priority
        self._aging_s = aging_s
        self._lines: dict[tuple[int, str], _Line[T]] = {}
        self._finish_tags: dict[str, float] = {}
        self._virtual_time = 0.0
        self._num_waiting: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def push(self, item: T, tenant: str, weight: float, cost: float, priority: int, now: float) -> Entry[T]:
        """Join the end of the tenant's line."""
        assert weight > 0
        assert priority <= self._max_priority
        start_tag = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
        self._finish_tags[tenant] = start_tag + cost / weight
        entry = Entry(item, tenant, priority, now, start_tag)
        self._lines.setdefault((priority, tenant), _Line()).entries.append(entry)
        self._num_waiting[priority] = self._num_waiting.get(priority, 0) + 1
        return entry

    def peek(self, now: float) -> Entry[T] | None:
        """Whoever goes next."""
        heads = [head for line in self._lines.values() if (head := line.head()) is not None]
        if not heads:
            return None
        return min(
            heads, key=lambda entry: (-self.risen_priority(entry, now), entry.start_tag, entry.arrived_at)
        )

    def pop(self, now: float) -> Entry[T] | None:
        """Serve the next one."""
        entry = self.peek(now)
        if entry is None:
            return None
        self.remove(entry)
        self._virtual_time = max(self._virtual_time, entry.start_tag)
        if not self._lines:
            self._finish_tags = {
                tenant: tag for tenant, tag in self._finish_tags.items() if tag > self._virtual_time
            }
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """It waits no longer (served, or gone); without effect the second time."""
        if not entry.is_waiting:
            return
        entry.is_waiting = False
        self._num_waiting[entry.priority] -= 1
        line = self._lines[entry.priority, entry.tenant]
        if line.head() is None:
            del self._lines[entry.priority, entry.tenant]

    def last_below(self, priority: int) -> Entry[T] | None:
        """The one that gives its place up for a newcomer of `priority`: of the lowest priority under it, the
        one that would be served last. What rose by waiting keeps its place to what it was sent with.
        """
        for low in sorted(level for level, num in self._num_waiting.items() if num and level < priority):
            waiting = [
                entry
                for (level, _), line in self._lines.items()
                if level == low
                for entry in line.entries
                if entry.is_waiting
            ]
            if waiting:
                return max(waiting, key=lambda entry: (entry.start_tag, entry.arrived_at))
        return None

    def waiting(self) -> list[Entry[T]]:
        """All that wait, in no order."""
        return [entry for line in self._lines.values() for entry in line.entries if entry.is_waiting]

    def num_below(self, priority: int) -> int:
        """How many could give their place up for a newcomer of `priority`."""
        return sum(num for level, num in self._num_waiting.items() if level < priority)

    def num_ahead(self, priority: int) -> int:
        """How many that wait now go before a newcomer of `priority`, at most."""
        return sum(num for level, num in self._num_waiting.items() if level >= priority)

    def risen_priority(self, entry: Entry[T], now: float) -> int:
        """What its priority has become by waiting."""
        risen = int((now - entry.arrived_at) / self._aging_s)
        return min(self._max_priority, entry.priority + risen)
