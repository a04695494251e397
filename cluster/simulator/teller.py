"""Teller: what a worker tells the router of its blocks and its load, and how that gets there.

Owns the set of blocks as it was told, its numbers and its digest, as `kv_transfer.feed.Feed` does on a real
worker. Messages may be lost, late and out of order, if they are to be. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.simulator.events import Events
from core.ids import WorkerRef
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, WorkerStatus
from kv_transfer.block_parts import BlockParts
from kv_transfer.feed import MAX_BATCH, page_of

Hear = Callable[[WorkerRef, WatchEvent], None]


@dataclass(frozen=True, slots=True)
class Way:
    """Of a message from a worker to the router: it takes `delay_s` and up to `jitter_s` more, so that later
    ones may come first, or is lost with probability `loss`. Load is told on the same way if `is_for_load`,
    else at once.
    """

    delay_s: float = 0.0005
    jitter_s: float = 0.0
    loss: float = 0.0
    is_for_load: bool = True


class Teller:
    """One per worker."""

    def __init__(self, ref: WorkerRef, events: Events, way: Way, chance: random.Random, hear: Hear) -> None:
        self._ref = ref
        self._events = events
        self._way = way
        self._chance = chance
        self._hear = hear
        self._blocks = BlockParts()
        self._number = 0
        self._pending: list[BlockEvent] = []
        self._status: WorkerStatus | None = None

    def successor(self, ref: WorkerRef) -> Teller:
        """Of the same worker in another role. Who asks for its blocks gets to know those it has already."""
        other = Teller(ref, self._events, self._way, self._chance, self._hear)
        other._blocks = self._blocks
        return other

    def note(self, events: Sequence[BlockEvent]) -> None:
        """Blocks came or went."""
        self._pending += events

    def tell(self, when: float) -> None:
        """Tell what was noted, at `when`."""
        if self._pending:
            self._events.at(when, self._tell, self._pending)
            self._pending = []

    def publish(self, when: float, status: WorkerStatus) -> None:
        """Tell the load at `when`, with a digest of the blocks."""
        self.tell(when)
        self._events.at(when, self._publish, status)

    def arrived(self, num_tokens: int, num_seqs: int, num_blocks: int) -> None:
        """A job has come that no status counts yet; see `Feed.arrived`."""
        status = self._status
        if status is None:
            return
        num_free = min(num_blocks, status.num_free_blocks)
        num_evicted = min(num_blocks - num_free, status.num_cached_blocks)
        more = replace(
            status,
            num_waiting=status.num_waiting + num_seqs,
            num_waiting_tokens=status.num_waiting_tokens + num_tokens,
            num_free_blocks=status.num_free_blocks - num_free,
            num_cached_blocks=status.num_cached_blocks - num_evicted,
            num_held_blocks=status.num_held_blocks + num_free + num_evicted,
        )
        self._publish(more)

    def page(self, job: SnapshotJob) -> BlockPage:
        """Some of the blocks, as of now."""
        return page_of(self._blocks, self._ref.epoch, self._number, job)

    def _tell(self, noted: Sequence[BlockEvent]) -> None:
        news = [event for event in noted if self._blocks.apply(event)]
        for start in range(0, len(news), MAX_BATCH):
            batch = tuple(news[start : start + MAX_BATCH])
            self._number += len(batch)
            self._send(WatchEvent(self._number, events=batch, epoch=self._ref.epoch))

    def _publish(self, status: WorkerStatus) -> None:
        self._status = status
        digest = WatchEvent(self._number, digest=self._blocks.digest, epoch=self._ref.epoch)
        if self._way.is_for_load:
            self._send(replace(digest, status=status))
            return
        self._send(digest)
        load = WatchEvent(self._number, status=status, epoch=self._ref.epoch)
        self._events.after(Way().delay_s, self._hear, self._ref, load)

    def _send(self, event: WatchEvent) -> None:
        way = self._way
        if way.loss and self._chance.random() < way.loss:
            return
        late = way.jitter_s * self._chance.random() if way.jitter_s else 0.0
        self._events.after(way.delay_s + late, self._hear, self._ref, event)
