"""BlockParts: the set of blocks that a worker holds, in parts by the first bits of their names.

Owns the set, its digest and the digests of its parts, so that any part can be compared and told without
copying the whole. Knows no watchers. Used on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.block_hash import NUM_PARTS, BlockHash, digest_part, part_of
from core.worker_status import BlockEvent, BlockEventKind, BlockTier


class BlockParts:
    """Block hash → tier. Empty at first."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._parts: list[dict[BlockHash, BlockTier] | None] = [None] * NUM_PARTS
        self._digests = [0] * NUM_PARTS
        self._count = 0
        self._xor = 0

    @property
    def digest(self) -> tuple[int, int]:
        """(count, XOR) of all blocks."""
        return self._count, self._xor

    def digest_of(self, part: int) -> int:
        """XOR of the blocks of one part."""
        return self._digests[part]

    def size_of(self, part: int) -> int:
        """How many blocks one part has."""
        blocks = self._parts[part]
        return 0 if blocks is None else len(blocks)

    def blocks_of(self, part: int) -> Iterator[tuple[BlockHash, BlockTier]]:
        """The blocks of one part, in no order that means anything."""
        return iter((self._parts[part] or {}).items())

    def apply(self, event: BlockEvent) -> bool:
        """Whether the event changed the set; one that did not is no news."""
        if event.kind is BlockEventKind.CLEARED:
            self._clear()
            return True
        block_hash = event.block_hash
        assert block_hash is not None
        part = part_of(block_hash)
        blocks = self._parts[part]
        old = None if blocks is None else blocks.get(block_hash)
        new = event.tier if event.kind is BlockEventKind.STORED else None
        if old is new:
            return False
        change = 0
        if old is not None:
            change ^= digest_part(block_hash, old)
        if new is not None:
            change ^= digest_part(block_hash, new)
        if blocks is None:
            blocks = self._parts[part] = {}
        if new is None:
            del blocks[block_hash]
        else:
            blocks[block_hash] = new
        self._count += (new is not None) - (old is not None)
        self._xor ^= change
        self._digests[part] ^= change
        return True
