"""Predictions: blocks that workers will hold, because a request that makes them was sent there.

Owns what is predicted until it comes true, is taken back, or its time is over; bounded. A prediction is no
part of a view and of no digest. A name stands for all before it, so a prompt is compared by halving, and a
prediction costs as little as a note. Lives on the event loop; time is an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from core.block_hash import BlockHash

K = TypeVar("K")

_MAX_BLOCKS = 262_144


@dataclass(eq=False, slots=True)
class Prediction:
    """The blocks `hashes` of a prompt, from its first on and one at least, on the worker whose view has
    `bit`, until then at most.
    """

    bit: int
    hashes: Sequence[BlockHash]
    until: float
    is_open: bool = True


class Predictions:
    """Those that stand, found by the first block of their prompts."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._by_first: dict[BlockHash, set[Prediction]] = {}
        self._by_last: dict[BlockHash, set[Prediction]] = {}
        self._by_bit: dict[int, set[Prediction]] = {}
        self._by_until: list[tuple[float, int, Prediction]] = []
        self._order = count()

    def __len__(self) -> int:
        return sum(map(len, self._by_bit.values()))

    def lengths(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """Bit → how many of `hashes`, from the first on, its view is expected to hold."""
        best: dict[int, int] = {}
        for prediction in self._by_first.get(hashes[0], ()) if hashes else ():
            own, length = prediction.hashes, best.get(prediction.bit, 0)
            end = min(len(own), len(hashes))
            if length < end and own[length] == hashes[length]:
                best[prediction.bit] = _common(own, hashes, length + 1, end)
        return best

    def add(self, bit: int, hashes: Sequence[BlockHash], until: float) -> Prediction:
        """Expect the blocks. Where there are too many, those that would end first are given up."""
        prediction = Prediction(bit, hashes, until)
        for group, key in ((self._by_first, hashes[0]), (self._by_last, hashes[-1])):
            group.setdefault(key, set()).add(prediction)
        self._by_bit.setdefault(bit, set()).add(prediction)
        self._num_blocks += len(hashes)
        self.end_by(prediction, until)
        while self._num_blocks > self._max_blocks and self._by_until:
            self.withdraw(heapq.heappop(self._by_until)[2])
        return prediction

    def end_by(self, prediction: Prediction, until: float) -> None:
        """It ends then, unless it comes true before."""
        if prediction.is_open:
            prediction.until = until
            heapq.heappush(self._by_until, (until, next(self._order), prediction))

    def withdraw(self, prediction: Prediction) -> None:
        """It is expected no more. Safe to call twice."""
        if not prediction.is_open:
            return
        prediction.is_open = False
        self._num_blocks -= len(prediction.hashes)
        _discard(self._by_first, prediction.hashes[0], prediction)
        _discard(self._by_last, prediction.hashes[-1], prediction)
        _discard(self._by_bit, prediction.bit, prediction)

    def fulfil(self, bit: int, block_hash: BlockHash) -> None:
        """The view holds the block: a prompt that ends with it is there as a whole."""
        for prediction in [each for each in self._by_last.get(block_hash, ()) if each.bit == bit]:
            self.withdraw(prediction)

    def drop(self, bit: int) -> None:
        """The view is gone."""
        for prediction in list(self._by_bit.get(bit, ())):
            self.withdraw(prediction)

    def expire(self, now: float) -> None:
        """Give up those whose time is over."""
        while self._by_until and self._by_until[0][0] <= now:
            until, _, prediction = heapq.heappop(self._by_until)
            if until == prediction.until:
                self.withdraw(prediction)


def _common(own: Sequence[BlockHash], hashes: Sequence[BlockHash], low: int, high: int) -> int:
    """Length of the common beginning, `low` at least and `high` at most."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if own[middle - 1] == hashes[middle - 1] else (low, middle - 1)
    return low


def _discard(groups: dict[K, set[Prediction]], key: K, prediction: Prediction) -> None:
    group = groups.get(key)
    if group is not None:
        group.discard(prediction)
        if not group:
            del groups[key]
