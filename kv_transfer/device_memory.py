"""What the bridge needs of a device so that two processes of one host share some of its memory.

Satisfied by the engine for a GPU, and by doubles on host memory. Calls block until the device has done what
they say; they are made on the bridge's own thread (`DeviceThread`), except where another one is named. Each
raises OSError or RuntimeError when the device refuses.

A digest takes the place of the frames' checksum: 64 bits of all bytes, their order and a seed, computed on
the device by both ends, the same for the same bytes whatever the device. It must change for certain when the
change is confined to one aligned word of eight bytes, and be missed by chance only (2⁻⁶⁴) otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DeviceCopy(Protocol):
    """A payload in memory that no other process can write to."""

    @property
    def nbytes(self) -> int: ...

    @property
    def digest(self) -> int: ...

    def write_to(self, block_ids: Sequence[int]) -> None:
        """Copy it into these blocks of the pool, one after the other; on the thread that owns the pool. What
        that thread asks of the device later sees it. Raises ValueError if the length does not fit.
        """
        ...


class DeviceRegion(Protocol):
    """Memory that another process can open, or that was opened here. After `close` the calls are refused."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def handle(self) -> bytes:
        """By which another process opens it; of memory that was allocated here."""
        ...

    def read(self, offset: int, num_bytes: int) -> bytes: ...

    def write(self, offset: int, data: bytes) -> None: ...

    def put(self, offset: int, block_ids: Sequence[int], seed: int) -> int:
        """Copy these blocks of the own pool to `offset`, one after the other. Returns the digest of what the
        blocks held, not of what lies in the region afterwards; when it returns, the region holds them.
        """
        ...

    def take(self, offset: int, num_bytes: int, seed: int) -> DeviceCopy:
        """A private copy and its digest; when it returns, the region is not read any more."""
        ...

    def close(self) -> None:
        """Free what was allocated, or unmap what was opened."""
        ...


class DeviceMemory(Protocol):
    """One device, and the pool of blocks on it."""

    @property
    def device_id(self) -> str:
        """The same in each process that sees this device, of no other device."""
        ...

    def can_reach(self, device_id: str) -> bool:
        """Whether memory of that device can be opened here: of this one, or of a peer of it."""
        ...

    def allocate(self, num_bytes: int) -> DeviceRegion: ...

    def open(self, handle: bytes, num_bytes: int) -> DeviceRegion:
        """What another process has exported; refused in the exporting process itself if the device cannot."""
        ...
