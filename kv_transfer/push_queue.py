"""PushQueue: which blocks of one ticket are still to be sent, which are in flight, which have arrived.

Owns the packing of consecutive blocks into frames, the window of bytes in flight and the sums of the commit.
It reads no block and does no I/O. Not thread-safe: lives on the IO loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of the ticket that travel in one frame; its borders do not change once sent."""

    first_index: int
    block_ids: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


class PushQueue:
    """Blocks come in by `add`, leave as runs by `next_run`, and are forgotten by `acknowledge`."""

    def __init__(self, num_blocks: int, block_bytes: int, frame_bytes: int, max_bytes_in_flight: int) -> None:
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._max_run = max(1, frame_bytes // block_bytes)
        self._max_in_flight = max(1, max_bytes_in_flight // block_bytes)  # blocks
        self._held: frozenset[int] | None = None
        self._waiting: deque[tuple[int, int]] = deque()  # (index in the ticket, block id)
        self._again: deque[BlockRun] = deque()
        self._unacked: dict[int, BlockRun] = {}  # by first index
        # by first index of each run ever sent; on a device another checksum is used
        self._checksums: dict[int, int] = {}
        self._is_on_device: dict[int, bool] = {}
        self._num_in_flight = 0  # blocks
        self.num_pushed_blocks = 0

    @property
    def has_unacked(self) -> bool:
        return bool(self._unacked)

    @property
    def checksum(self) -> int:
        """XOR of the payload checksums of all runs sent."""
        total = 0
        for value in self._checksums.values():
            total ^= value
        return total

    @property
    def is_empty(self) -> bool:
        """All that was added has arrived."""
        return not (self._waiting or self._again or self._unacked)

    @property
    def is_complete(self) -> bool:
        """Every block of the ticket is either held by decode or was added."""
        held = len(self._held) if self._held is not None else 0
        return held + len(self._waiting) + self._num_in_flight + self.num_pushed_blocks == self.num_blocks

    def hold(self, indexes: Collection[int]) -> None:
        """Decode has these already: they are never sent. Called once, when the offer is answered."""
        assert self._held is None
        self._held = frozenset(indexes)
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in self._held)

    def pack(self, frame_bytes: int) -> None:
        """From now on runs are packed to `frame_bytes`, and the window holds four of them at least; runs that
        were sent keep their borders.
        """
        self._max_run = max(1, frame_bytes // self._block_bytes)
        self._max_in_flight = max(self._max_in_flight, 4 * self._max_run)

    def add(self, first_index: int, block_ids: Sequence[int]) -> None:
        """These blocks are computed; before `hold` they only wait."""
        for index, block_id in enumerate(block_ids, first_index):
            if self._held is None or index not in self._held:
                self._waiting.append((index, block_id))

    def next_run(self) -> BlockRun | None:
        """The next run to send, now in flight; None when there is nothing to send or the window is full."""
        if self._again:
            return self._again.popleft()
        room = self._max_in_flight - self._num_in_flight
        # a run may exceed the window when nothing else is in flight: a block can be larger than the window
        if self._held is None or not self._waiting or (room < 1 and self._unacked):
            return None
        first_index, block_id = self._waiting.popleft()
        ids = [block_id]
        limit = min(self._max_run, room)
        while len(ids) < limit and self._waiting and self._waiting[0][0] == first_index + len(ids):
            ids.append(self._waiting.popleft()[1])
        run = BlockRun(first_index, tuple(ids))
        self._unacked[first_index] = run
        self._num_in_flight += run.num_blocks
        return run

    def sent(self, run: BlockRun, checksum: int, is_on_device: bool = False) -> None:
        """Note the payload's checksum. Sent again the same way it must be the same: leased blocks do not
        change.
        """
        if self._is_on_device.setdefault(run.first_index, is_on_device) != is_on_device:
            self._is_on_device[run.first_index] = is_on_device
            self._checksums[run.first_index] = checksum
        known = self._checksums.setdefault(run.first_index, checksum)
        assert known == checksum, f"leased blocks {run.block_ids} changed while they were in flight"

    def acknowledge(self, first_index: int, num_blocks: int) -> bool:
        """Decode has written this run. False when no such run is in flight (a repeated acknowledgement)."""
        run = self._unacked.get(first_index)
        if run is None or run.num_blocks != num_blocks:
            return False
        del self._unacked[first_index]
        self._num_in_flight -= num_blocks
        self.num_pushed_blocks += num_blocks
        return True

    def rewind(self) -> None:
        """The stream broke: everything in flight is sent again, first."""
        self._again = deque(self._unacked.values())
