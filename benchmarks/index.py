"""What the index of cached blocks costs: bytes of each block; times to match, follow, repair and forget.

`--blocks` distinct blocks over `--workers`; half of each worker's are chains of its own, half are shared by
four workers. Times are of one thread. A piece is the longest that the event loop is held at once.

    python -m benchmarks.index
    python -m benchmarks.index --blocks 100000 --workers 8
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from core.block_hash import BlockHash
from core.ids import Epoch, WorkerId
from core.jobs import WatchEvent
from core.worker_status import BlockEvent, BlockEventKind
from kv_transfer.block_parts import BlockParts
from kv_transfer.feed import MAX_BATCH, page_of
from router.prefix_index import PrefixIndex

_EPOCH = Epoch(1)
_PROMPT_BLOCKS = 512  # 8,192 tokens in blocks of 16


class Told:
    """One worker: its set, and the number of the last event."""

    def __init__(self, name: str) -> None:
        self.worker_id = WorkerId(name)
        self.blocks = BlockParts()
        self.number = 0

    def store(self, hashes: Iterable[BlockHash]) -> Iterator[WatchEvent]:
        """The messages that tell it."""
        batch: list[BlockEvent] = []
        for block_hash in hashes:
            event = BlockEvent(BlockEventKind.STORED, block_hash)
            if self.blocks.apply(event):
                batch.append(event)
            if len(batch) == MAX_BATCH:
                yield self._message(batch)
                batch = []
        if batch:
            yield self._message(batch)

    def summary(self) -> WatchEvent:
        return WatchEvent(self.number, digest=self.blocks.digest, epoch=_EPOCH)

    def _message(self, batch: list[BlockEvent]) -> WatchEvent:
        self.number += len(batch)
        return WatchEvent(self.number, events=tuple(batch), epoch=_EPOCH)


class Fleet:
    """`num_blocks` distinct blocks over `num_workers`, and an index that has heard of all of them.

    `num_held`: blocks summed over the workers. `bytes_per_block`: what the index has taken for each distinct
    one, its name included.
    """

    def __init__(self, num_blocks: int, num_workers: int, chance: random.Random) -> None:
        self.index = PrefixIndex()
        self.workers = [Told(f"w{number}") for number in range(num_workers)]
        self.prompt = _names(_PROMPT_BLOCKS, chance)
        names = _names(num_blocks - _PROMPT_BLOCKS, chance)
        num_shared = len(names) // 2
        shares: list[list[BlockHash]] = [[] for _ in self.workers]
        for position, block_hash in enumerate(names):
            first = position % num_workers
            for offset in range(4 if position < num_shared else 1):
                shares[(first + offset) % num_workers].append(block_hash)
        for position, share in enumerate(shares):
            # each holds another length of the prompt, the last all of it
            share += self.prompt[: _PROMPT_BLOCKS * (position + 1) // num_workers]
        self.num_held = sum(map(len, shares))
        told = [
            (worker, [worker.summary(), *worker.store(share)])
            for worker, share in zip(self.workers, shares, strict=True)
        ]
        gc.collect()
        before = _resident_bytes()
        for worker, events in told:
            self.index.join(worker.worker_id, _EPOCH)
            for event in events:
                self.index.apply(worker.worker_id, event)
        # a name comes with the messages, which are kept here: 49 bytes, rounded up by the allocator
        self.bytes_per_block = (_resident_bytes() - before) / num_blocks + 64


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _names(num: int, chance: random.Random) -> list[BlockHash]:
    return [BlockHash(chance.randbytes(16)) for _ in range(num)]


def _times(call: Callable[[], object], num: int) -> list[float]:
    times = []
    for _ in range(num):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)


def _repair(fleet: Fleet, worker: Told) -> tuple[int, list[float]]:
    """Pages of a repair, and seconds of each piece of work of the router."""
    pieces: list[float] = []
    num_pages = 0
    while (job := fleet.index.ask(worker.worker_id)) is not None:
        page = page_of(worker.blocks, _EPOCH, worker.number, job)
        num_pages += 1
        filling = fleet.index.fill(worker.worker_id, job, page)
        is_open = True
        while is_open:
            began = time.perf_counter()
            is_open = next(filling, filling) is not filling
            pieces.append(time.perf_counter() - began)
    return num_pages, pieces


def _report(name: str, times: list[float], what: str = "") -> None:
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    numbers = (
        f"p50 {statistics.median(times) * 1e3:.3f} ms, p99 {p99 * 1e3:.3f}, longest {times[-1] * 1e3:.3f}"
    )
    print(f"{name:32} {numbers}{what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    options = parser.parse_args()
    chance = random.Random(0)
    fleet = Fleet(options.blocks, options.workers, chance)
    gc.freeze()
    index, last = fleet.index, fleet.workers[-1]
    print(
        f"{options.blocks} blocks on {options.workers} workers, {fleet.num_held} held: "
        f"{fleet.bytes_per_block:.0f} bytes for each"
    )
    assert index.match(fleet.prompt)[last.worker_id] == _PROMPT_BLOCKS
    assert len(index.match(fleet.prompt)) == options.workers
    _report("match 512 blocks", _times(lambda: index.match(fleet.prompt), 1000))
    cold = _names(_PROMPT_BLOCKS, chance)
    _report("match 512 unknown blocks", _times(lambda: index.match(cold), 1000))
    until = time.monotonic() + 600.0
    for _ in range(200):
        index.predict(last.worker_id, fleet.prompt[:256] + _names(256, chance), until)
    _report("match, 200 prompts predicted", _times(lambda: index.match(fleet.prompt), 1000))

    apply_s = []
    for event in last.store(_names(128 * MAX_BATCH, chance)):
        began = time.perf_counter()
        index.apply(last.worker_id, event)
        apply_s.append(time.perf_counter() - began)
    _report(f"take in {MAX_BATCH} events", sorted(apply_s))

    first = fleet.workers[0]
    lost = list(first.store(_names(3, chance)))
    index.apply(first.worker_id, first.summary())
    num_pages, pieces = _repair(fleet, first)
    _report("repair after 3 lost events", sorted(pieces), f"; {num_pages} pages, {sum(pieces) * 1e3:.1f} ms")
    assert len(lost) == 1
    index.forget(first.worker_id)
    index.join(first.worker_id, _EPOCH)
    index.apply(first.worker_id, first.summary())
    num_pages, pieces = _repair(fleet, first)
    _report("learn a worker anew", sorted(pieces), f"; {num_pages} pages, {sum(pieces) * 1e3:.1f} ms")
    index.apply(first.worker_id, first.summary())
    assert index.confidence(first.worker_id) == 1.0

    _report("forget a worker", _times(lambda: index.forget(last.worker_id), 1))
    pieces = []
    is_more = True
    while is_more:
        began = time.perf_counter()
        is_more = index.clear_some()
        pieces.append(time.perf_counter() - began)
    _report("clear away what it held", sorted(pieces), f"; {len(pieces)} pieces, {sum(pieces) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
