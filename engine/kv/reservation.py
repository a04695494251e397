"""Reservation: blocks held for a ticket before its sequences exist.

A value; the blocks are acquired, published and given back by KVCache.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for `num_tokens` tokens that come from elsewhere and for what follows them.

    `table` holds the prompt's blocks in order, then the first sample's room to grow. `sample_tables[i]` are
    the blocks that sample i + 1 has for itself: a copy of the tail, if there is one, and its own room. `held`
    are the indexes into `table` whose content was here already, always the first ones; they are shared and
    must not be written.
    """

    num_tokens: int
    block_hashes: tuple[BlockHash, ...]
    table: tuple[int, ...]
    sample_tables: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks that this reservation lists as a holder, each once."""
        return self.table + tuple(block_id for table in self.sample_tables for block_id in table)
