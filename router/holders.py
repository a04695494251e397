"""Holders: block hash → which views hold it, as bit masks, in parts by the hash's first bits.

Owns the masks, the bits and who has them. A bit that its view gives up is cleared from the masks in the
background; until then it counts for nothing and is not given out again, so that a view of any size is
dropped at once. Lives on the event loop; no call takes longer than one part, or than its budget, says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from core.block_hash import NUM_PARTS, BlockHash

_MAX_SHARED_MASKS = 4096


class Holders:
    """Masks are plain integers: a dictionary of a hash and a shared integer is all that a block costs."""

    def __init__(self) -> None:
        self.live = 0
        """Mask of the bits that are given out."""
        self.parts: list[dict[BlockHash, int]] = [{} for _ in range(NUM_PARTS)]
        """Part → hash → mask. Read by whoever matches; written here only."""
        self._given_up = 0
        self._clearing = 0
        self._next_part = 0
        # one object for each mask that is common, instead of one for each block
        self._shared: dict[int, int] = {}

    def take_bit(self) -> int:
        """A mask of one bit that no block has."""
        used = self.live | self._given_up | self._clearing
        bit = ~used & (used + 1)
        self.live |= bit
        return bit

    def give_up(self, bit: int) -> None:
        """The bit counts for nothing from now on."""
        self.live &= ~bit
        self._given_up |= bit

    def add(self, part: int, block_hash: BlockHash, bit: int) -> None:
        blocks = self.parts[part]
        blocks[block_hash] = self._share(blocks.get(block_hash, 0) | bit)

    def discard(self, part: int, block_hash: BlockHash, bit: int) -> None:
        self._put(self.parts[part], block_hash, self.parts[part].get(block_hash, 0) & ~bit)

    def has(self, part: int, block_hash: BlockHash, bit: int) -> bool:
        return bool(self.parts[part].get(block_hash, 0) & bit)

    def blocks_of(self, part: int, bit: int) -> list[BlockHash]:
        """The blocks of a part that the bit's view holds."""
        return [block_hash for block_hash, mask in self.parts[part].items() if mask & bit]

    def clear(self, max_blocks: int) -> bool:
        """Go on with clearing bits that were given up, for about so many blocks; whether any are left."""
        if not self._clearing:
            if not self._given_up:
                return False
            self._clearing, self._given_up = self._given_up, 0
        keep, num_seen = ~self._clearing, 0
        for part in islice(range(NUM_PARTS), self._next_part, None):
            if num_seen >= max_blocks:
                return True
            blocks = self.parts[part]
            num_seen += len(blocks) + 1
            for block_hash, mask in [item for item in blocks.items() if item[1] & self._clearing]:
                self._put(blocks, block_hash, mask & keep)
            self._next_part = part + 1
        self._next_part, self._clearing = 0, 0
        return self._given_up != 0

    def __len__(self) -> int:
        """Distinct blocks, those included that only cleared views held."""
        return sum(map(len, self.parts))

    def _put(self, blocks: dict[BlockHash, int], block_hash: BlockHash, mask: int) -> None:
        if mask:
            blocks[block_hash] = self._share(mask)
        else:
            blocks.pop(block_hash, None)

    def _share(self, mask: int) -> int:
        shared = self._shared.get(mask)
        if shared is not None:
            return shared
        if len(self._shared) >= _MAX_SHARED_MASKS:
            self._shared.clear()  # those in use live on in the blocks
        self._shared[mask] = mask
        return mask


def walk(holders: Holders, hashes: Sequence[BlockHash]) -> dict[int, int]:
    """Bit → how many of `hashes`, from the first on, its view holds without a hole. Bits with none are
    absent.
    """
    lengths: dict[int, int] = {}
    parts, alive, length = holders.parts, holders.live, 0
    for block_hash in hashes:
        still = parts[block_hash[0] << 4 | block_hash[1] >> 4].get(block_hash, 0) & alive
        if still != alive:
            if length:
                _note(lengths, alive & ~still, length)
            alive = still
            if not alive:
                return lengths
        length += 1
    if length:
        _note(lengths, alive, length)
    return lengths


def _note(lengths: dict[int, int], mask: int, length: int) -> None:
    while mask:
        bit = mask & -mask
        lengths[bit] = length
        mask ^= bit
