"""Blocks of one size handed over as blocks of another: whole ones are merged, or split.

Owns which of decode's blocks are complete when which of prefill's are, and how the bytes of one lie in the
other. Names are not its business: each worker names blocks of its own size, so the ticket bears decode's. No
I/O; lives on the IO loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from core.kv_layout import KVLayout
from kv_transfer.transport import BlockStore


class Reblocking:
    """A BlockStore of `layout` for the blocks of one ticket, whose ids are their indexes in it.

    `store` must be convertible to it: `KVLayout.can_become`. A tail is filled up with zeros.
    """

    def __init__(self, store: BlockStore, layout: KVLayout, num_tokens: int) -> None:
        assert store.layout.can_become(layout)
        self.layout = layout
        self._store = store
        self._num_tokens = num_tokens
        self._ids: dict[int, int] = {}  # index in prefill's blocks → prefill's block id
        self._num_own = store.layout.num_blocks(num_tokens)
        self._num_blocks = layout.num_blocks(num_tokens)
        self._done: set[int] = set()

    def add(self, first_index: int, block_ids: Sequence[int]) -> list[int]:
        """Prefill's blocks are there: the indexes of decode's blocks that are complete with them."""
        self._ids.update(enumerate(block_ids, first_index))
        own, wanted = self._store.layout.block_size, self.layout.block_size
        first = first_index * own // wanted
        end = min(self._num_blocks, -(-(first_index + len(block_ids)) * own // wanted))
        complete = [index for index in range(first, end) if self._is_complete(index)]
        self._done.update(complete)
        return complete

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        target = memoryview(bytearray(len(block_ids) * self.layout.block_bytes))
        self.read_blocks_into(block_ids, target)
        return target

    def read_blocks_into(self, block_ids: Sequence[int], target: memoryview) -> None:
        """See BlockStore; prefill's blocks are read once more than they would be, and copied once more."""
        shape = (len(block_ids), *self.layout.block_shape[:-1], -1)
        # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_bytes]
        blocks = np.frombuffer(target, dtype=np.uint8).reshape(shape)
        for block, index in zip(blocks, block_ids, strict=True):
            self._read(index, block)

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        raise AssertionError("blocks of another size are only sent")

    def _read(self, index: int, block: np.ndarray) -> None:
        own, wanted = self._store.layout.block_size, self.layout.block_size
        sources = self._sources(index)
        shape = (len(sources), *self._store.layout.block_shape[:-1], -1)
        payload = self._store.read_blocks([self._ids[source] for source in sources])
        found = np.frombuffer(payload, dtype=np.uint8).reshape(shape)
        if wanted < own:
            slot = index * wanted % own
            block[:] = found[0, :, :, :, slot : slot + wanted]
            return
        for number, part in enumerate(found):
            block[:, :, :, number * own : (number + 1) * own] = part
        block[:, :, :, len(found) * own :] = 0

    def _sources(self, index: int) -> range:
        """Of prefill's blocks, those whose tokens decode's block `index` holds."""
        own, wanted = self._store.layout.block_size, self.layout.block_size
        first, end = index * wanted // own, -(-(index + 1) * wanted // own)
        return range(first, min(end, self._num_own))

    def _is_complete(self, index: int) -> bool:
        return index not in self._done and all(source in self._ids for source in self._sources(index))


def reblocked(layout: KVLayout, block_size: int) -> KVLayout | None:
    """`layout` with blocks of that size, if its blocks can be handed over as such."""
    wanted = replace(layout, block_size=block_size)
    return wanted if layout.can_become(wanted) else None
