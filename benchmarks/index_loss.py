"""What the index is worth when block events are lost, late and out of order.

One worker of 4,000 blocks stores 400 a second and evicts as many, for a minute of virtual time; a page takes
5 ms. Prints, over the last 55 s: how much of what the worker holds the index knows, the confidence that it
states, and what mending costs.

    python -m benchmarks.index_loss
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import count

from core.block_hash import BlockHash
from core.ids import Epoch, WorkerId
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind
from kv_transfer.block_parts import BlockParts
from kv_transfer.feed import page_of
from router.prefix_index import PrefixIndex

_EPOCH, _WORKER = Epoch(1), WorkerId("w")
_TICK_S, _PAGE_S, _PAUSE_S, _END_S = 0.005, 0.005, 0.05, 60.0
_CAPACITY = 4000


class _Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


@dataclass(frozen=True, slots=True)
class Way:
    """Each message is lost with probability `loss`; else it takes `delay_s` and up to `jitter_s` more."""

    loss: float
    delay_s: float
    jitter_s: float


class Run:
    def __init__(self, way: Way, chance: random.Random) -> None:
        self._way = way
        self._chance = chance
        self._clock = _Clock()
        self.index = PrefixIndex(self._clock)
        self._blocks = BlockParts()
        self._held: deque[BlockHash] = deque()
        self._number = 0
        self._transit: list[tuple[float, int, WatchEvent]] = []
        self._order = count()
        self._page: tuple[float, SnapshotJob, BlockPage] | None = None
        self._ask_at = 0.0
        self.num_pages = 0
        self.known: list[float] = []
        self.confidence: list[float] = []

    def run(self) -> None:
        self.index.join(_WORKER, _EPOCH)
        for tick in range(round(_END_S / _TICK_S)):
            self._clock.at = tick * _TICK_S
            if tick % 4 == 0:
                self._change()
            if tick % 200 == 0:
                self._send(WatchEvent(self._number, digest=self._blocks.digest, epoch=_EPOCH))
            while self._transit and self._transit[0][0] <= self._clock.at:
                self.index.apply(_WORKER, heapq.heappop(self._transit)[2])
            self._mend()
            if tick % 100 == 50 and tick > 1000:
                names = self._chance.sample(self._held, 200)
                self.known.append(sum(bool(self.index.match([name])) for name in names) / len(names))
                self.confidence.append(self.index.confidence(_WORKER))

    def _change(self) -> None:
        new = [BlockHash(self._chance.randbytes(16)) for _ in range(8)]
        self._held += new
        events = [BlockEvent(BlockEventKind.STORED, name) for name in new]
        while len(self._held) > _CAPACITY:
            events.append(BlockEvent(BlockEventKind.REMOVED, self._held.popleft()))
        for event in events:
            self._blocks.apply(event)
        self._number += len(events)
        self._send(WatchEvent(self._number, events=tuple(events), epoch=_EPOCH))

    def _send(self, event: WatchEvent) -> None:
        if self._chance.random() >= self._way.loss:
            at = self._clock.at + self._way.delay_s + self._chance.random() * self._way.jitter_s
            heapq.heappush(self._transit, (at, next(self._order), event))

    def _mend(self) -> None:
        if self._page is not None and self._page[0] <= self._clock.at:
            for _ in self.index.fill(_WORKER, *self._page[1:]):
                pass
            self._page = None
        if self._page is None and self._clock.at >= self._ask_at:
            job = self.index.ask(_WORKER)
            if job is None:
                self._ask_at = self._clock.at + _PAUSE_S
                return
            page = page_of(self._blocks, _EPOCH, self._number, job)
            self._page = (self._clock.at + _PAGE_S, job, page)
            self.num_pages += 1


def main() -> None:
    for way in (
        Way(0.0, 0.001, 0.0),
        Way(0.1, 0.001, 0.0),
        Way(0.0, 1.0, 0.0),
        Way(0.0, 1.0, 0.5),
        Way(0.1, 1.0, 0.5),
    ):
        run = Run(way, random.Random(0))
        run.run()
        print(
            f"loss {way.loss:.0%}, delay {way.delay_s} to {way.delay_s + way.jitter_s} s: "
            f"{statistics.mean(run.known):.1%} of the blocks known, "
            f"confidence {statistics.mean(run.confidence):.2f}, {run.num_pages / _END_S:.1f} pages/s"
        )


if __name__ == "__main__":
    main()
