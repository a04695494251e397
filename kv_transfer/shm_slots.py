"""Slots: which parts of a staging memory are free, in flight, or in quarantine, at prefill.

A slot belongs to one frame from before it is filled until decode has acknowledged the frame. What a broken
stream left without acknowledgement is quarantined: decode may still read it, until it has answered a commit
or an abort of its ticket. The last slot given back is the next one used, so that little memory is touched and
it stays in the processor's cache. No I/O; lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from core.ids import TicketId


class Sliceable(Protocol):
    """Memory as slots need it: a memoryview, or what stands for memory of a device."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """`memory` is all of it; `offset` is counted from the first slot's first byte."""

    offset: int
    memory: Any  # as sliced of a Sliceable


class Slots:
    """Equal parts of `memory`, which is not shared with anyone but decode."""

    def __init__(self, memory: Sliceable, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = len(memory) // slot_bytes
        assert self.num_slots > 0
        offsets = range(0, self.num_slots * slot_bytes, slot_bytes)
        self._free = [Slot(offset, memory[offset : offset + slot_bytes]) for offset in reversed(offsets)]
        self._waiters: deque[asyncio.Future[Slot | None]] = deque()
        self._quarantined: dict[TicketId, list[Slot]] = {}
        self._is_closed = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return sum(map(len, self._quarantined.values()))

    @property
    def is_exhausted(self) -> bool:
        """No slot is free, and none is in flight that could become free by an acknowledgement."""
        return not self._free and self.num_quarantined == self.num_slots

    @property
    def is_worn(self) -> bool:
        """Nothing is in flight, and half of the slots or more are in quarantine: tickets have ended of which
        decode could not be told.
        """
        num_quarantined = self.num_quarantined
        is_idle = self.num_free + num_quarantined == self.num_slots
        return is_idle and 2 * num_quarantined >= self.num_slots

    async def take(self) -> Slot | None:
        """A free slot, first come first served; None when closed or exhausted, also while waiting."""
        if self._is_closed or self.is_exhausted:
            return None
        if self._free:
            return self._free.pop()
        waiter: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # it may have been handed over at the same time
            slot = waiter.result() if waiter.done() and not waiter.cancelled() else None
            if slot is not None:
                self.give_back(slot)
            raise

    def give_back(self, slot: Slot) -> None:
        """Decode does not read it any more (or never heard of it)."""
        if self._is_closed:
            slot.memory.release()
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)

    def quarantine(self, ticket_id: TicketId, slots: Iterable[Slot]) -> None:
        """Decode may still read them on behalf of the ticket."""
        left = list(slots)
        if self._is_closed:
            _let_go(left)
            return
        if left:
            self._quarantined.setdefault(ticket_id, []).extend(left)
        if self.is_exhausted:
            self._send_waiters_away()

    def release(self, ticket_id: TicketId) -> None:
        """Decode has answered the ticket's commit or abort: it reads none of its slots any more."""
        for slot in self._quarantined.pop(ticket_id, []):
            self.give_back(slot)

    def close(self) -> None:
        """Forget the memory; whoever waits gets None, what is given back later is dropped."""
        self._is_closed = True
        _let_go(self._free)
        for slots in self._quarantined.values():
            _let_go(slots)
        self._free.clear()
        self._quarantined.clear()
        self._send_waiters_away()

    def _send_waiters_away(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _let_go(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.memory.release()
