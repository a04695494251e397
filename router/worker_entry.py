"""WorkerEntry: what the router knows of one incarnation of a worker.

Owns its last status, the load that this router has placed on it, what was learned of its speed, and the
calls that are to fail when it is lost. This router's load is known exactly at each moment; the status tells
what others have placed there. Written by `worker_table` and `placed`, read by `placer` and `pipeline`. Lives
on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from core.errors import WorkerLost
from core.ids import Role, WorkerRef
from core.worker_status import Announcement, WorkerStatus
from router.worker_rates import WorkerRates
from router.workers import Worker

T = TypeVar("T")


class WorkerState(StrEnum):
    """`CONNECTING`: listed, not heard of yet. `SUSPECT`: silent for too long. `DEAD`: its Watch broke."""

    CONNECTING = "connecting"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(eq=False, slots=True)
class Reservation:
    """Load of this router's on a worker, from the decision until it is released.

    `num_tokens` are to be read and attend to `num_pairs`, 0 once they are; `num_blocks` will be taken.
    """

    num_tokens: int
    num_seqs: int
    made_at: float
    num_pairs: float = 0.0
    num_blocks: int = 0
    is_streaming: bool = False
    is_released: bool = False

    @property
    def is_arriving(self) -> bool:
        """Its prompt is read by another worker, which hands the KV over."""
        return self.num_tokens == 0 and not self.is_streaming


@dataclass(slots=True)
class _Load:
    """Tokens to read, sequences, those of the sequences that stream, and those whose KV is still to come."""

    num_tokens: int = 0
    num_pairs: float = 0.0
    num_seqs: int = 0
    num_streams: int = 0
    num_arriving: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class WorkerEntry:
    """Mutable; `announcement` may be refreshed, its `ref` never changes."""

    announcement: Announcement
    worker: Worker
    heard_at: float
    state: WorkerState = WorkerState.CONNECTING
    status: WorkerStatus | None = None
    task: asyncio.Task[None] | None = None
    is_abandoned: bool = False
    rates: WorkerRates = field(default_factory=WorkerRates)
    _own: _Load = field(default_factory=_Load)
    _foreign: _Load = field(default_factory=_Load)
    _num_pending_blocks: int = 0
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
        """Tokens that requests of this router have still to read there."""
        return self._own.num_tokens

    @property
    def num_reserved_seqs(self) -> int:
        """Sequences of requests of this router."""
        return self._own.num_seqs

    @property
    def num_ahead_tokens(self) -> int:
        """Tokens that the worker reads before those of a new request, whoever placed them."""
        return self._own.num_tokens + self._foreign.num_tokens

    @property
    def num_ahead_pairs(self) -> float:
        """What those of this router attend to; of what others placed only the tokens are known."""
        return self._own.num_pairs

    @property
    def num_kv_blocks(self) -> int:
        """Blocks that requests hold there, or will when what was promised since its last status has come."""
        return self._num_pending_blocks + (0 if self.status is None else self.status.num_held_blocks)

    @property
    def num_seqs(self) -> int:
        """Sequences that it has or will have, whoever placed them."""
        return self._own.num_seqs + self._foreign.num_seqs

    @property
    def num_streams(self) -> int:
        """Those of them that get a token each step."""
        return self._own.num_streams + self._foreign.num_streams

    @property
    def num_active(self) -> int:
        """All of them but those whose prompt is read elsewhere: those who wait for this one's steps."""
        return self.num_seqs - self._own.num_arriving

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that were promised since its last status."""
        return self._num_pending_blocks

    def reserve(self, reservation: Reservation) -> None:
        """Count load that is on its way to the worker, until it is released."""
        self._own.num_tokens += reservation.num_tokens
        self._own.num_pairs += reservation.num_pairs
        self._own.num_seqs += reservation.num_seqs
        self._own.num_arriving += reservation.num_seqs if reservation.is_arriving else 0
        self._num_pending_blocks += reservation.num_blocks

    def begin_stream(self, reservation: Reservation) -> None:
        """Its prompt is read, and its sequences are among those that get a token each step."""
        if not reservation.is_released and not reservation.is_streaming:
            self._own.num_arriving -= reservation.num_seqs if reservation.is_arriving else 0
            self._own.num_tokens -= reservation.num_tokens
            self._own.num_pairs -= reservation.num_pairs
            self._own.num_streams += reservation.num_seqs
            reservation.num_tokens = 0
            reservation.num_pairs = 0.0
            reservation.is_streaming = True

    def release(self, reservation: Reservation) -> None:
        """The load is gone. Safe to call twice."""
        if reservation.is_released:
            return
        reservation.is_released = True
        self._own.num_tokens -= reservation.num_tokens
        self._own.num_pairs -= reservation.num_pairs
        self._own.num_seqs -= reservation.num_seqs
        self._own.num_streams -= reservation.num_seqs if reservation.is_streaming else 0
        self._own.num_arriving -= reservation.num_seqs if reservation.is_arriving else 0
        self._num_pending_blocks = max(0, self._num_pending_blocks - reservation.num_blocks)

    def take_status(self, status: WorkerStatus) -> None:
        """What the worker has beyond this router's load was placed by others. What of ours is still on its
        way hides as much of theirs, until the next status.
        """
        self.status = status
        num_unread = status.num_waiting_tokens + max(0, status.num_running_tokens - status.num_running)
        num_streams = status.num_running if status.ref.role is Role.DECODE else 0
        num_seqs = status.num_waiting + status.num_running
        own = self._own
        num_foreign = max(0, num_seqs - own.num_seqs)
        # the worker's count of our own tokens may be larger than ours: it does not know what will be cached
        num_tokens = min(num_unread - own.num_tokens, num_unread * num_foreign // max(1, num_seqs))
        self._foreign = _Load(
            num_tokens=max(0, num_tokens),
            num_seqs=num_foreign,
            num_streams=max(0, num_streams - own.num_seqs),
        )
        self._num_pending_blocks = 0

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
