"""Evictable: the cached blocks by owner, each owner's in order of last use, and how many blocks each owns.

Owns the books that `shares` decides on. Knows nothing of names; whether a block may go yet (its children
first) is the allocator's to say. Used on the step thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from engine.kv.shares import KVShares


class Evictable:
    """Blocks are owned from their naming on, and cached while nobody holds them."""

    def __init__(self, shares: KVShares, num_blocks: int) -> None:
        self.shares = shares
        self._num_blocks = num_blocks
        self._owners: dict[int, str] = {}
        self._num_owned: dict[str, int] = {}
        self._cached: dict[str, OrderedDict[int, int]] = {}
        self._num_cached = 0
        self._now = 0

    def __len__(self) -> int:
        return self._num_cached

    def __contains__(self, block_id: int) -> bool:
        owner = self._owners.get(block_id)
        return owner is not None and block_id in self._cached.get(owner, ())

    def __iter__(self) -> Iterator[int]:
        return (block_id for blocks in self._cached.values() for block_id in blocks)

    def num_owned(self, owner: str) -> int:
        """Named blocks of that owner, held or cached."""
        return self._num_owned.get(owner, 0)

    def owner_of(self, block_id: int) -> str | None:
        return self._owners.get(block_id)

    def own(self, block_id: int, owner: str) -> None:
        """The block, which is held, is that owner's."""
        assert block_id not in self
        self.disown(block_id)
        self._owners[block_id] = owner
        self._num_owned[owner] = self._num_owned.get(owner, 0) + 1

    def disown(self, block_id: int) -> None:
        """The block, which is not cached, has no name any more."""
        owner = self._owners.pop(block_id, None)
        if owner is None:
            return
        self._num_owned[owner] -= 1
        if not self._num_owned[owner]:
            del self._num_owned[owner]

    def add(self, block_id: int) -> None:
        """The last holder of an owned block let go of it."""
        self._now += 1
        self._cached.setdefault(self._owners[block_id], OrderedDict())[block_id] = self._now
        self._num_cached += 1

    def remove(self, block_id: int) -> None:
        """It is held again, or evicted."""
        owner = self._owners[block_id]
        del self._cached[owner][block_id]
        if not self._cached[owner]:
            del self._cached[owner]
        self._num_cached -= 1

    def next(self, may_go: Callable[[int], bool], owner: str = "", num_more: int = 0) -> int:
        """The block to evict next: by the owners' shares, then by age, leaving out what may not go yet.
        `owner` needs room for `num_more`.
        """
        num_owned = self._num_owned
        if num_more:
            num_owned = {**num_owned, owner: num_owned.get(owner, 0) + num_more}
        last_used = {owner: next(iter(blocks.values())) for owner, blocks in self._cached.items()}
        for loser in self.shares.losers(num_owned, last_used, self._num_blocks):
            for block_id in self._cached[loser]:
                if may_go(block_id):
                    return block_id
        raise AssertionError("no cached block may go: a held child without its parent")
