"""DecodeInputs: what a recorded decode step reads, at addresses that never change, filled by one copy a step.

Owns the layout of that memory, on the device and in pinned memory of the host, and how padding looks. Two
buffers take turns on the host, so that one is filled while the copy of the other may not have run yet. Used
on the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch, Ints
from engine.kernels.work import DecodeWork, StepWork
from engine.token_feed import NO_SLOT

_NUM_BUFFERS = 2
_ITEM, _MERGE = 5, 4  # columns, see DecodeWork
_MERGE_TOKEN = 1  # the column of the row that a result is written to


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """`size` rows with at most `capacity` splits of attention and `max_blocks` blocks each."""

    size: int
    capacity: int
    max_blocks: int

    @property
    def num_words(self) -> int:
        """int32 words: four int64 columns, then number of items, items, merges and tables."""
        return (
            8 * self.num_columns
            + 4
            + _padded(_ITEM * self.capacity)
            + _MERGE * self.size
            + self.num_table_words
        )

    @property
    def num_columns(self) -> int:
        """Numbers in an int64 column, so many that the next begins at a multiple of 16 bytes."""
        return self.size + self.size % 2

    @property
    def num_table_words(self) -> int:
        return _padded(self.size * self.max_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class InputViews:
    """Parts of one flat int32 buffer."""

    token_ids: torch.Tensor  # int64 [size]
    positions: torch.Tensor  # int64 [size]
    slots: torch.Tensor  # int64 [size], where keys and values go; -1 in padding: nowhere
    feed_slots: torch.Tensor  # int64 [size], where a token is taken from; -1: from `token_ids`
    num_items: torch.Tensor  # int32 [1]
    items: torch.Tensor  # int32 [capacity, 5]; what is beyond `num_items` is never read
    merges: torch.Tensor  # int32 [size, 4]
    tables: torch.Tensor  # int32 [size, max_blocks]; what no item reaches is never read

    @classmethod
    def of(cls, flat: torch.Tensor, shape: DecodeShape) -> InputViews:
        size, at = shape.size, 8 * shape.num_columns
        columns = flat[:at].view(torch.int64).view(4, -1)[:, :size]
        num_items = flat[at : at + 1]
        at += 4
        items = flat[at : at + _ITEM * shape.capacity].view(shape.capacity, _ITEM)
        at += _padded(_ITEM * shape.capacity)
        merges = flat[at : at + _MERGE * size].view(size, _MERGE)
        at += _MERGE * size
        tables = flat[at : at + size * shape.max_blocks].view(size, shape.max_blocks)
        token_ids, positions, slots, feed_slots = columns.unbind(0)
        return cls(token_ids, positions, slots, feed_slots, num_items, items, merges, tables)

    def decode_work(self, split: int) -> DecodeWork:
        return DecodeWork(1, split, self.items, self.num_items, self.merges, self.tables)


class DecodeInputs:
    """Memory for the largest of `shapes`; each shape lays it out in its own way."""

    def __init__(self, shapes: Sequence[DecodeShape], device: torch.device) -> None:
        num_words = max(shape.num_words for shape in shapes)
        self._is_cuda = device.type == "cuda"
        self._device_words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._host_words = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(_NUM_BUFFERS)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def on_device(self, shape: DecodeShape) -> InputViews:
        """Views that hold what the last `fill` or `clear` of that shape brought."""
        return InputViews.of(self._device_words, shape)

    def clear(self, shape: DecodeShape) -> None:
        """A step of nothing but padding: it reads the pool's first slot and keeps nothing."""
        host = self._next_host(shape)
        for part in (host.token_ids, host.positions, host.tables):
            part.zero_()
        host.slots.fill_(NO_SLOT)
        host.feed_slots.fill_(NO_SLOT)
        host.num_items.fill_(1)
        host.items[0] = torch.tensor([0, 0, 0, 1, 0])
        host.merges[0] = torch.tensor([0, 0, 1, 0])
        _pad(host, 1)
        self._send(shape)

    def fill(self, shape: DecodeShape, batch: Batch, work: StepWork, feed_slots: Ints | None) -> None:
        """The step `batch`, whose `work` lies on the host."""
        (decode,) = work.decodes
        host, count = self._next_host(shape), len(batch.num_new)
        host.token_ids[:count] = batch.token_ids
        host.positions[:count] = batch.positions
        host.slots[:count] = work.slots
        host.feed_slots[:count] = NO_SLOT if feed_slots is None else torch.from_numpy(feed_slots)
        host.num_items.fill_(len(decode.items))
        host.items[: len(decode.items)] = decode.items
        host.merges[:count] = decode.merges
        host.tables[:count, : decode.tables.shape[1]] = decode.tables
        _pad(host, count)
        self._send(shape)

    def _next_host(self, shape: DecodeShape) -> InputViews:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # two steps ago: done, unless the host is far ahead
        return InputViews.of(self._host_words[self._turn], shape)

    def _send(self, shape: DecodeShape) -> None:
        num_words = shape.num_words
        source = self._host_words[self._turn][:num_words]
        self._device_words[:num_words].copy_(source, non_blocking=True)
        if self._is_cuda:
            event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event


def _pad(host: InputViews, count: int) -> None:
    """Rows from `count` on repeat the first one, whose attention they share, but keep nothing."""
    host.token_ids[count:] = host.token_ids[0]
    host.positions[count:] = host.positions[0]
    host.slots[count:] = NO_SLOT
    host.feed_slots[count:] = host.feed_slots[0]
    host.merges[count:] = host.merges[0]
    host.merges[count:, _MERGE_TOKEN] = torch.arange(count, len(host.merges), dtype=torch.int32)


def _padded(num_words: int) -> int:
    """Parts begin at multiples of 16 bytes, as kernels take pointers to."""
    return -(-num_words // 4) * 4
