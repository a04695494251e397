"""WorkerEntry: what the router knows of one incarnation of a worker.

Owns its last status, the load that the router has placed on it since, and the calls that are to fail when
it is lost. Written by `worker_table`, read by `placement` and `pipeline`. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from core.errors import WorkerLost
from core.ids import WorkerRef
from core.worker_status import Announcement, WorkerStatus
from router.workers import Worker

T = TypeVar("T")

# a status may have been on its way when the load was placed; after this long it has seen it
_STATUS_LAG_S = 0.25


class WorkerState(StrEnum):
    """`CONNECTING`: listed, not heard of yet. `SUSPECT`: silent for too long. `DEAD`: its Watch broke."""

    CONNECTING = "connecting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(eq=False, frozen=True, slots=True)
class Reservation:
    """Load placed on a worker that its next status does not show yet."""

    num_tokens: int
    num_seqs: int
    made_at: float


@dataclass(eq=False, slots=True)
class WorkerEntry:
    """Mutable; `announcement` may be refreshed, its `ref` never changes."""

    announcement: Announcement
    worker: Worker
    heard_at: float
    state: WorkerState = WorkerState.CONNECTING
    status: WorkerStatus | None = None
    task: asyncio.Task[None] | None = None
    is_abandoned: bool = False
    _reservations: set[Reservation] = field(default_factory=set)
    _on_abandon: set[Callable[[], object]] = field(default_factory=set)

    @property
    def ref(self) -> WorkerRef:
        return self.announcement.ref

    @property
    def is_draining(self) -> bool:
        return self.status is not None and self.status.is_draining

    @property
    def is_usable(self) -> bool:
        return self.state is WorkerState.ALIVE and not self.is_draining

    @property
    def num_reserved_tokens(self) -> int:
        return sum(reservation.num_tokens for reservation in self._reservations)

    @property
    def num_reserved_seqs(self) -> int:
        return sum(reservation.num_seqs for reservation in self._reservations)

    def reserve(self, num_tokens: int, num_seqs: int, now: float) -> Reservation:
        """Count load that is on its way to the worker, until it is released or a status shows it."""
        reservation = Reservation(num_tokens, num_seqs, now)
        self._reservations.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """The load is gone, or was never placed."""
        self._reservations.discard(reservation)

    def take_status(self, status: WorkerStatus) -> None:
        """The worker's own count replaces what was reserved before it was made."""
        self.status = status
        newest = self.heard_at - _STATUS_LAG_S
        self._reservations = {item for item in self._reservations if item.made_at > newest}

    def on_abandon(self, call: Callable[[], object]) -> Callable[[], None]:
        """Have `call` called once when the worker is lost, now if it is; returns how to take that back."""
        if self.is_abandoned and self.state is not WorkerState.ALIVE:
            call()
        else:
            self._on_abandon.add(call)
        return lambda: self._on_abandon.discard(call)

    async def until_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result; WorkerLost as soon as the table gives the worker up."""
        task = asyncio.create_task(call)
        forget = self.on_abandon(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise WorkerLost("the worker is lost", worker_id=self.ref.worker_id) from None
        finally:
            forget()

    def abandon(self) -> None:
        """The worker is lost: fail everything that waits for it, and what would from now on."""
        self.is_abandoned = True
        calls, self._on_abandon = self._on_abandon, set()
        for call in calls:
            call()

    def revive(self) -> None:
        """The worker is heard of again."""
        self.is_abandoned = False
