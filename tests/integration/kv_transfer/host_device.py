"""A DeviceMemory on the host: regions are memfds that another process opens, blocks those of a ByteStore."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import xxhash

from kv_transfer.transport import BlockStore


class HostCopy:
    def __init__(self, store: BlockStore, data: bytes, seed: int) -> None:
        self.nbytes = len(data)
        self.digest: int = xxhash.xxh3_64_intdigest(data, seed)
        self._store = store
        self._data = data

    def write_to(self, block_ids: Sequence[int]) -> None:
        self._store.write_blocks(block_ids, self._data)


class HostRegion:
    """`view` is all of it; `handle` names a descriptor of the process that has made it."""

    def __init__(self, store: BlockStore, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.handle = f"{os.getpid()}:{descriptor}".encode()
        self.view = memoryview(mmap.mmap(descriptor, num_bytes))
        self._store = store
        self._descriptor: int | None = descriptor

    @property
    def is_closed(self) -> bool:
        return self._descriptor is None

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self._part(offset, num_bytes))

    def write(self, offset: int, data: bytes) -> None:
        self._part(offset, len(data))[:] = data

    def put(self, offset: int, block_ids: Sequence[int], seed: int) -> int:
        target = self._part(offset, len(block_ids) * self._store.layout.block_bytes)
        self._store.read_blocks_into(block_ids, target)
        return int(xxhash.xxh3_64_intdigest(target, seed))

    def take(self, offset: int, num_bytes: int, seed: int) -> HostCopy:
        return HostCopy(self._store, self.read(offset, num_bytes), seed)

    def close(self) -> None:
        if self._descriptor is not None:
            self.view.release()
            os.close(self._descriptor)
            self._descriptor = None

    def _part(self, offset: int, num_bytes: int) -> memoryview:
        if self._descriptor is None:
            raise OSError("the region is closed")
        return self.view[offset : offset + num_bytes]


class HostDevice:
    """`device_id` is that of all on this host, unless the test says otherwise."""

    region_type: type[HostRegion] = HostRegion

    def __init__(self, store: BlockStore, device_id: str = "host") -> None:
        self.device_id = device_id
        self._store = store

    def can_reach(self, device_id: str) -> bool:
        return device_id == self.device_id

    def allocate(self, num_bytes: int) -> HostRegion:
        descriptor = os.memfd_create("baton-device")
        os.ftruncate(descriptor, num_bytes)
        return self.region_type(self._store, descriptor, num_bytes)

    def open(self, handle: bytes, num_bytes: int) -> HostRegion:
        process, number = handle.decode().split(":")
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        return self.region_type(self._store, descriptor, num_bytes)
