"""Block names: a chained keyed hash of each full block of token ids.

The hash is rooted in tenant salt, model, adapter and layout, so two tenants, models or block shapes never
share a name. It is the only name of a block that crosses between workers. Sets of names are kept and
compared in parts, by a name's first bits. Pure functions; usable from any thread.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

NUM_PARTS = 4096
"""Names are spread evenly over so many parts: of a million blocks one is told or replaced in under 0.1 ms."""

_DIGEST_BYTES = 16
_TIER_STEP = 0x9E3779B97F4A7C15  # odd, without pattern (2**64 / golden ratio)
_LOW_64_BITS = (1 << 64) - 1


def root_hash(cache_salt: str, layout_fingerprint: str, adapter: str = "") -> BlockHash:
    """The parent of every first block under this salt, layout and adapter.

    Fields are length-prefixed, so no two different triples concatenate alike.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"baton-root")
    for field in (cache_salt, layout_fingerprint, adapter):
        data = field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return BlockHash(digest.digest())


def child_hash(parent: BlockHash, token_ids: bytes | memoryview) -> BlockHash:
    """The name of the block that follows `parent` and holds `token_ids` (little-endian int32 bytes)."""
    return BlockHash(hashlib.blake2b(token_ids, digest_size=_DIGEST_BYTES, key=parent).digest())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Names of all full blocks of `token_ids`, in order; the partly filled tail has none.

    Source: the chained block hash of vLLM's prefix cache design, with a keyed cryptographic hash in place
    of a plain one.
    """
    return extend_hashes(root, [], token_ids, block_size)


def extend_hashes(
    root: BlockHash, known: Sequence[BlockHash], token_ids: Sequence[int], block_size: int
) -> list[BlockHash]:
    """Like `hash_blocks`, given the names of the first `len(known)` blocks; returns the whole list."""
    hashes = list(known)
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return hashes[:num_full]
    start = len(hashes) * block_size
    data = memoryview(token_bytes(token_ids[start : num_full * block_size]))
    parent = hashes[-1] if hashes else root
    stride = block_size * 4
    for offset in range(0, len(data), stride):
        parent = child_hash(parent, data[offset : offset + stride])
        hashes.append(parent)
    return hashes


def part_of(block_hash: BlockHash) -> int:
    """Which of the `NUM_PARTS` parts the name belongs to: its first twelve bits, big-endian."""
    return block_hash[0] << 4 | block_hash[1] >> 4


def digest_part(block_hash: BlockHash, tier: int = 0) -> int:
    """What a block adds, by XOR, to the digest of a set: its name's first eight bytes, little-endian, plus
    `tier` steps modulo 2**64.
    """
    return (int.from_bytes(block_hash[:8], "little") + tier * _TIER_STEP) & _LOW_64_BITS
