"""Loans: cached blocks that are being sent to prefill workers, so that they do not read again what is here.

Owns the holds on these blocks, from the moment a prompt's cached prefix is looked up until nobody reads it
any more. The blocks were computed or verified before and stay findable; nobody writes to them. Used on the
step thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.block_hash import BlockHash
from core.ids import TicketId
from engine.kv.cache import KVCache


class Loans:
    """By ticket. Messages may come twice or late."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._tables: dict[TicketId, list[int]] = {}

    def begin(self, ticket_id: TicketId, block_hashes: Sequence[BlockHash]) -> tuple[int, ...]:
        """Hold the longest prefix that is cached here; its blocks, none if there are none."""
        assert ticket_id not in self._tables, "a ticket is lent on once"
        block_ids = self._cache.match(block_hashes)
        if block_ids:
            self._cache.allocator.hold(block_ids)
            self._tables[ticket_id] = block_ids
        return tuple(block_ids)

    def end(self, ticket_id: TicketId) -> None:
        """Nobody reads the blocks any more."""
        block_ids = self._tables.pop(ticket_id, None)
        if block_ids is not None:
            self._cache.allocator.release(block_ids)

    def tables(self) -> Iterator[list[int]]:
        """The blocks of each loan, for the allocator's check."""
        return iter(self._tables.values())

    def __len__(self) -> int:
        return len(self._tables)
