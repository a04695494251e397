"""KVPool: the tensors of all KV blocks of one worker.

Owns the memory and the form in which a block leaves and enters it; who may write to which block is the
allocator's business. Written on the step thread; `read_blocks` and `read_blocks_into` may run on any thread
for blocks that are leased, since nobody writes to those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from core.errors import InvalidConfig
from core.kv_layout import KVLayout

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int8": torch.int8,
        "float8_e4m3fn": torch.float8_e4m3fn,
    }
)
"""The layout's names of types."""
_PRIVATE_BYTES = 256 << 10
"""Small enough to stay in a core's own cache for three passes, and few pieces: 15 GB/s into a pool of 1 GB,
11 with pieces of 128 KiB.
"""


class KVPool:
    """`num_blocks` blocks of `layout` on one device.

    `tensor` is `[num_layers, 2 (K, V), num_blocks, num_kv_heads, block_size, head_dim]`: the blocks of one
    layer are one contiguous array of slots per head, a block that travels is gathered from the layers.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        """Raises InvalidConfig if the device has no memory for it."""
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
        # zeros, not empty: a stale NaN in a slot that is masked out would still poison 0 * NaN
        try:
            self.tensor = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=self.device)
        except RuntimeError as error:
            if self.device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise InvalidConfig(
                f"there is no memory for {num_blocks} KV blocks of {layout.block_bytes} bytes on "
                f"{self.device}: lower engine.kv_cache_bytes or engine.num_kv_blocks",
                key="engine.kv_cache_bytes",
            ) from error
        self._bytes = self.tensor.view(
            torch.uint8
        )  # [num_layers, 2, num_blocks, num_kv_heads, block_size, bytes]

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """A copy of the blocks, one payload after the other, each `layout.block_shape`; `len(block_ids) *
        block_bytes` bytes.
        """
        staging = torch.empty((len(block_ids), *self._block_shape), dtype=torch.uint8)
        for index, block_id in enumerate(block_ids):
            staging[index].copy_(self._bytes[:, :, block_id])
        return staging.numpy().data.cast("B") if block_ids else memoryview(b"")

    def read_blocks_into(self, block_ids: Sequence[int], target: memoryview) -> None:
        """`read_blocks`, written to `target` (writable, contiguous) in one copy. Raises ValueError if its
        length does not fit the number of blocks.
        """
        expected = len(block_ids) * self.layout.block_bytes
        if target.nbytes != expected:
            raise ValueError(f"target has {target.nbytes} bytes, {len(block_ids)} blocks have {expected}")
        if not block_ids:
            return
        blocks = np.frombuffer(target, dtype=np.uint8).reshape(len(block_ids), *self._block_shape)
        if self.device.type == "cpu":
            source = self._bytes.numpy()
            for index, block_id in enumerate(block_ids):
                blocks[index] = source[:, :, block_id]
            return
        staging = torch.from_numpy(blocks)
        for index, block_id in enumerate(block_ids):
            staging[index].copy_(self._bytes[:, :, block_id])

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        """The inverse of `read_blocks`. Raises ValueError if the payload's length does not fit the number of
        blocks.

        `observe`, if given, is called with all bytes of the payload in their order, and what it sees is what
        the blocks hold afterwards even if `payload` changes during the call: each piece is copied to private
        memory, observed there, and written from there.
        """
        expected = len(block_ids) * self.layout.block_bytes
        view = memoryview(payload)
        if view.nbytes != expected:
            raise ValueError(f"payload has {view.nbytes} bytes, {len(block_ids)} blocks have {expected}")
        if not block_ids:
            return
        # numpy takes read-only and unaligned buffers without a copy
        source = np.frombuffer(view, dtype=np.uint8).reshape(len(block_ids), *self._block_shape)
        if self.device.type == "cpu":
            if observe is not None:
                self._write_observed(block_ids, source, observe)
                return
            target = self._bytes.numpy()
            for index, block_id in enumerate(block_ids):
                target[:, :, block_id] = source[index]
            return
        private = source.copy()
        if observe is not None:
            observe(private.data.cast("B"))
        staged = torch.from_numpy(private).to(self.device)
        for index, block_id in enumerate(block_ids):
            self._bytes[:, :, block_id].copy_(staged[index])

    def _write_observed(
        self, block_ids: Sequence[int], source: npt.NDArray[np.uint8], observe: Callable[[memoryview], object]
    ) -> None:
        # [num_layers * 2, num_blocks, bytes]: a block's part of each layer's keys or values is one row
        target = self._bytes.numpy().reshape(self.layout.num_layers * 2, self.num_blocks, -1)
        num_rows, _, row_bytes = target.shape
        step = max(1, _PRIVATE_BYTES // row_bytes)
        private = np.empty((min(step, num_rows), row_bytes), dtype=np.uint8)
        for rows, block_id in zip(
            source.reshape(len(block_ids), num_rows, row_bytes), block_ids, strict=True
        ):
            for first in range(0, num_rows, step):
                piece = private[: min(step, num_rows - first)]
                np.copyto(piece, rows[first : first + step])
                observe(piece.data.cast("B"))
                target[first : first + step, block_id] = piece

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each (source, target); all sources are read before any target is written."""
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.device)
        targets = torch.tensor([target for _, target in pairs], device=self.device)
        self.tensor[:, :, targets] = self.tensor[:, :, sources]

    def clear_slots(self, block_id: int, first_slot: int) -> None:
        """Zero the slots of a block from `first_slot` on: what its former owners left there."""
        self.tensor[:, :, block_id, :, first_slot:] = 0

    @property
    def _block_shape(self) -> tuple[int, int, int, int, int]:
        shape = self._bytes.shape
        return (shape[0], shape[1], shape[3], shape[4], shape[5])
