"""BlockAllocator: who owns which block.

Each block is in exactly one of four sets: *free*, *cached* (nobody holds it, its content has a name and may
be found again, evictable), *held* (with a count of holders) or in *quarantine* (somebody outside may still
write to it). Knows ids only, no tensors, no sequences. Used on the step thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from core.block_hash import BlockHash
from engine.kv.evictable import Evictable
from engine.kv.prefix_cache import EventListener, PrefixCache
from engine.kv.shares import KVShares


class BlockAllocator:
    """Holder counts, least-recently-used eviction within the owners' shares, and publication of full blocks.

    Eviction takes children before parents: a table is released from its end, so in an owner's queue of cached
    blocks a parent always stands behind its children, and a holder of a child holds the parent too. Where the
    owner of a chain became known late, a parent waits for children in another queue.
    Per name there is at most one cached block, and none while a copy is held: further copies return to *free*
    at once.
    """

    def __init__(self, num_blocks: int, on_events: EventListener | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.on_events = on_events
        self.prefix_cache = PrefixCache()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = Evictable(KVShares(), num_blocks)
        self._holders = [0] * num_blocks
        self._num_held = 0
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take: free and cached."""
        return len(self._free) + len(self._cached)

    def num_holders(self, block_id: int) -> int:
        return self._holders[block_id]

    def is_writable(self, block_id: int) -> bool:
        """Exactly one holder, and nobody can find the content by name."""
        return self._holders[block_id] == 1 and self.prefix_cache.name_of(block_id) is None

    def lookup(self, block_hash: BlockHash) -> int | None:
        """A cached or held block with that name; it stays only if held before the next allocation."""
        return self.prefix_cache.lookup(block_hash)

    def try_allocate(self, num: int, owner: str = "") -> list[int] | None:
        """`num` blocks with one holder each, undefined content; None (nothing changes) if there are not as
        many.
        """
        return self.try_acquire((), num, owner)

    def try_acquire(self, shared: Sequence[int], num_new: int, owner: str = "") -> list[int] | None:
        """Hold the blocks `shared` once more and allocate `num_new`, both or neither.

        Returns the new blocks. `shared` are distinct blocks that are cached or held; none of them is evicted
        to make room. `owner` is who needs them, if that is known.
        """
        num_revived = sum(1 for block_id in shared if block_id in self._cached)
        if num_new > self.num_available - num_revived:
            return None
        self.hold(shared)
        new = [self._take(owner, num_new) for _ in range(num_new)]
        self._emit()
        return new

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; each must be cached or held."""
        for block_id in block_ids:
            if self._holders[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is neither held nor cached"
                self._cached.remove(block_id)
                self._num_held += 1
            self._holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a table given in order; the last holder leaves it cached if
        published, else free.
        """
        for block_id in reversed(block_ids):
            assert self._holders[block_id] > 0, f"block {block_id} is released but not held"
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                self._num_held -= 1
                self._retire(block_id)
        self._emit()

    def use_shares(self, shares: KVShares) -> None:
        """Evict by these shares from now on."""
        self._cached.shares = shares

    def num_owned(self, owner: str) -> int:
        """Named blocks of that owner, held or cached."""
        return self._cached.num_owned(owner)

    def own(self, block_ids: Sequence[int], owner: str) -> None:
        """Held blocks of one chain, in its order, turn out to be that owner's; those without a name are left
        out. If the last one is his already, so are all.
        """
        if block_ids and self._cached.owner_of(block_ids[-1]) == owner:
            return
        for block_id in block_ids:
            if self.prefix_cache.name_of(block_id) is not None:
                self._cached.own(block_id, owner)

    def publish(
        self, block_id: int, block_hash: BlockHash, parent_block: int | None, owner: str = ""
    ) -> bool:
        """Name a held, full, verified block, which is then `owner`'s; it is never written again.

        `parent_block` is the block before it in the same table, None for the first. False (nothing changes)
        if that one has no name, for then this one could never be found, or if the name is known with another
        parent.
        """
        assert self._holders[block_id] > 0, f"block {block_id} is published but not held"
        parent = None if parent_block is None else self.prefix_cache.name_of(parent_block)
        if parent_block is not None and parent is None:
            return False
        duplicates = self.prefix_cache.copies(block_hash)
        if not self.prefix_cache.add(block_id, block_hash, parent):
            return False
        self._cached.own(block_id, owner)
        for duplicate in duplicates:
            if duplicate in self._cached:
                self._evict(duplicate)
        self._emit()
        return True

    def clear_cache(self) -> None:
        """Evict all cached blocks; what somebody holds stays findable."""
        while self._cached:
            self._evict(self._cached.next(self._may_go))
        self._emit()

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """The only holder gives its unpublished blocks away while a writer outside may still be at work on
        them.
        """
        for block_id in block_ids:
            assert self.is_writable(block_id), f"block {block_id} is shared or published"
            self._holders[block_id] = 0
            self._num_held -= 1
            self._quarantined.add(block_id)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """No writer is left: the blocks are free."""
        for block_id in block_ids:
            assert block_id in self._quarantined, f"block {block_id} is not in quarantine"
            self._quarantined.remove(block_id)
            self._free.append(block_id)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that counts equal the sum over the holders' `tables` (sequences, leases, reservations) and
        that the sets partition.
        """
        expected = Counter(block_id for table in tables for block_id in table)
        for block_id in range(self.num_blocks):
            count, wanted = self._holders[block_id], expected[block_id]
            assert count == wanted, f"block {block_id} counts {count} holders, its holders are {wanted}"
        assert set(expected) <= set(range(self.num_blocks)), "a table lists a block that does not exist"
        held = {block_id for block_id, count in expected.items() if count > 0}
        sets = (self._free, list(self._cached), list(held), list(self._quarantined))
        assert sum(map(len, sets)) == self.num_blocks, "the four sets overlap or lack a block"
        assert set().union(*sets) == set(range(self.num_blocks)), "the four sets do not cover the pool"
        assert self._num_held == len(held)
        self._check_names(held)

    def leak_difference(self, tables: Iterable[Sequence[int]]) -> int:
        """Sum over the blocks of |count − holders that list it|; 0 unless there is a bug."""
        expected = Counter(block_id for table in tables for block_id in table)
        return sum(abs(count - expected[block_id]) for block_id, count in enumerate(self._holders))

    def _check_names(self, held: set[int]) -> None:
        named: dict[BlockHash, list[int]] = {}
        for block_id, block_hash in self.prefix_cache.named_blocks():
            named.setdefault(block_hash, []).append(block_id)
        blocks = {block_id for copies in named.values() for block_id in copies}
        assert set(self._cached) <= blocks, "a cached block has no name"
        assert blocks <= held | set(self._cached), "a free or quarantined block has a name"
        names = dict(self.prefix_cache.items())
        assert named.keys() == names.keys(), "the index and the blocks disagree"
        for block_hash, copies in named.items():
            assert sorted(self.prefix_cache.copies(block_hash)) == sorted(copies)
            assert len(copies) == 1 or held.issuperset(copies), (
                "a copy of a named block is cached beside another"
            )
            parent = names[block_hash]
            assert parent is None or parent in names, "a published block outlived its parent"

    def _take(self, owner: str, num_more: int) -> int:
        if not self._free:
            self._evict(self._cached.next(self._may_go, owner, num_more))
        block_id = self._free.pop()
        self._holders[block_id] = 1
        self._num_held += 1
        return block_id

    def _may_go(self, block_id: int) -> bool:
        return not self.prefix_cache.has_children(block_id)

    def _evict(self, block_id: int) -> None:
        self._cached.remove(block_id)
        self._cached.disown(block_id)
        self.prefix_cache.discard(block_id)
        self._free.append(block_id)

    def _retire(self, block_id: int) -> None:
        block_hash = self.prefix_cache.name_of(block_id)
        if block_hash is not None and len(self.prefix_cache.copies(block_hash)) == 1:
            self._cached.add(block_id)
            return
        self._cached.disown(block_id)
        self.prefix_cache.discard(block_id)
        self._free.append(block_id)

    def _emit(self) -> None:
        events = self.prefix_cache.take_events()
        if events and self.on_events is not None:
            self.on_events(events)
