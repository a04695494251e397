"""Predictions: blocks that workers will hold, because a request that makes them was sent there.

Owns what is predicted until it comes true, is taken back, or its time is over; bounded. A prediction is no
part of a view and of no digest. Lives on the event loop; time is an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from core.block_hash import BlockHash

_MAX_BLOCKS = 262_144


@dataclass(eq=False, slots=True)
class Prediction:
    """The blocks `hashes` of one request, on the worker whose view has `bit`, until then at most."""

    bit: int
    hashes: Sequence[BlockHash]
    until: float
    is_open: bool = True


class Predictions:
    """`masks`: hash → bits of the views that are expected to hold it; read by whoever matches."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self.masks: dict[BlockHash, int] = {}
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._sources: dict[BlockHash, tuple[Prediction, ...]] = {}
        self._by_bit: dict[int, set[Prediction]] = {}
        self._dropped: list[Prediction] = []
        self._by_until: list[tuple[float, int, Prediction]] = []
        self._order = count()

    def __len__(self) -> int:
        """Predictions that stand."""
        return sum(map(len, self._by_bit.values()))

    def add(self, bit: int, hashes: Sequence[BlockHash], until: float) -> Prediction:
        """Expect the blocks. Where there are too many, those that would end first are given up."""
        prediction = Prediction(bit, hashes, until)
        for block_hash in hashes:
            self._sources[block_hash] = (*self._sources.get(block_hash, ()), prediction)
            self.masks[block_hash] = self.masks.get(block_hash, 0) | bit
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
        """What has not come true of it is expected no more. Safe to call twice."""
        if not prediction.is_open:
            return
        prediction.is_open = False
        self._num_blocks -= len(prediction.hashes)
        siblings = self._by_bit.get(prediction.bit)
        if siblings is not None:
            siblings.discard(prediction)
            if not siblings:
                del self._by_bit[prediction.bit]
        for block_hash in prediction.hashes:
            sources = self._sources.get(block_hash, ())
            self._put(block_hash, tuple(source for source in sources if source is not prediction))

    def fulfil(self, bit: int, block_hash: BlockHash) -> None:
        """The view holds the block: whatever expected it has come true."""
        sources = self._sources.get(block_hash)
        if sources is not None:
            self._put(block_hash, tuple(source for source in sources if source.bit != bit))

    def drop(self, bit: int) -> None:
        """The view is gone; `clear` takes its predictions back, before the bit may be used again."""
        self._dropped += self._by_bit.pop(bit, ())

    def clear(self, max_blocks: int) -> bool:
        """Go on with what was dropped, for about so many blocks; whether any is left."""
        num_seen = 0
        while self._dropped and num_seen < max_blocks:
            prediction = self._dropped.pop()
            num_seen += len(prediction.hashes)
            self.withdraw(prediction)
        return bool(self._dropped)

    def expire(self, now: float) -> None:
        """Give up those whose time is over."""
        while self._by_until and self._by_until[0][0] <= now:
            until, _, prediction = heapq.heappop(self._by_until)
            if until == prediction.until:
                self.withdraw(prediction)

    def _put(self, block_hash: BlockHash, sources: tuple[Prediction, ...]) -> None:
        if not sources:
            self._sources.pop(block_hash, None)
            self.masks.pop(block_hash, None)
            return
        self._sources[block_hash] = sources
        mask = 0
        for source in sources:
            mask |= source.bit
        self.masks[block_hash] = mask
