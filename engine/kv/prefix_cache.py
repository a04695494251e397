"""PrefixCache: block hash → block, and the events that tell others which hashes exist here.

Owns names only: whether a block is held, cached or free is the allocator's business, and only the allocator
writes here. No tensors. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from core.block_hash import BlockHash
from core.worker_status import BlockEvent, BlockEventKind

EventListener = Callable[[tuple[BlockEvent, ...]], None]


class PrefixCache:
    """The published blocks by name.

    Several blocks may carry one name (two sequences computed the same prefix side by side); `lookup` answers
    one of them. Events speak of the set of names: STORED with the first copy, REMOVED with the last. A name
    is admitted only if its parent is present, so the set is closed under "parent of" as long as the allocator
    drops children first: of a chain of names, a prefix is present.
    """

    def __init__(self) -> None:
        self._copies: dict[BlockHash, list[int]] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._names: dict[int, BlockHash] = {}
        self._num_children: dict[BlockHash, int] = {}
        self._events: list[BlockEvent] = []

    def __len__(self) -> int:
        """Number of distinct names."""
        return len(self._copies)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._copies

    def items(self) -> Iterator[tuple[BlockHash, BlockHash | None]]:
        """(name, parent) of all present names, parents before children; the snapshot from which a feed
        starts.
        """
        return iter(self._parents.items())

    def lookup(self, block_hash: BlockHash) -> int | None:
        """A block with that name, or None."""
        copies = self._copies.get(block_hash)
        return copies[0] if copies else None

    def match(self, names: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest present prefix of `names`, a chain from a first block on; `names` is read no
        further than that.
        """
        blocks: list[int] = []
        parent: BlockHash | None = None
        for block_hash in names:
            copies = self._copies.get(block_hash)
            if copies is None or self._parents[block_hash] != parent:
                break
            blocks.append(copies[0])
            parent = block_hash
        return blocks

    def copies(self, block_hash: BlockHash) -> tuple[int, ...]:
        """All blocks with that name, the one that `lookup` answers first."""
        return tuple(self._copies.get(block_hash, ()))

    def has_children(self, block_id: int) -> bool:
        """Whether the block's name would leave children behind if this block went."""
        name = self._names[block_id]
        return len(self._copies[name]) == 1 and self._num_children.get(name, 0) > 0

    def name_of(self, block_id: int) -> BlockHash | None:
        """The name under which the block is published, or None."""
        return self._names.get(block_id)

    def named_blocks(self) -> Iterator[tuple[int, BlockHash]]:
        return iter(self._names.items())

    def add(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Publish the block under a name whose parent is present; False (nothing changes) if the name is
        known with another parent. `parent` is None for a first block.
        """
        assert block_id not in self._names, f"block {block_id} has a name already"
        assert parent is None or parent in self._copies, "the parent of a name is published first"
        copies = self._copies.get(block_hash)
        if copies is not None:
            if self._parents[block_hash] != parent:
                return False
            self._names[block_id] = block_hash
            copies.append(block_id)
            return True
        self._names[block_id] = block_hash
        self._copies[block_hash] = [block_id]
        self._parents[block_hash] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._events.append(BlockEvent(BlockEventKind.STORED, block_hash, parent))
        return True

    def discard(self, block_id: int) -> None:
        """Take the block's name away, if it has one."""
        block_hash = self._names.pop(block_id, None)
        if block_hash is None:
            return
        copies = self._copies[block_hash]
        copies.remove(block_id)
        if not copies:
            del self._copies[block_hash]
            parent = self._parents.pop(block_hash)
            if parent is not None:
                self._num_children[parent] -= 1
                if not self._num_children[parent]:
                    del self._num_children[parent]
            self._events.append(BlockEvent(BlockEventKind.REMOVED, block_hash, parent))

    def take_events(self) -> tuple[BlockEvent, ...]:
        """Events since the last call, in order; CLEARED stands for several of them that left nothing."""
        events = tuple(self._events)
        self._events.clear()
        if len(events) > 1 and not self._copies:
            return (BlockEvent(BlockEventKind.CLEARED),)
        return events
