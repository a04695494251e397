"""CudaIpcSource: memory of a GPU that another process can open; a MemorySource.

Owns allocations and mappings and the rules of their handles. Called on the bridge's thread for the device.
"""

from __future__ import annotations

import os

import torch

from engine.gpu.cuda_driver import HANDLE_BYTES, CudaDriver, load_driver
from engine.gpu.ipc_memory import PoolIpcMemory
from engine.kv.pool import KVPool

_GRANULE = 2 << 20
"""The driver cuts smaller allocations out of pieces of this size, and a handle opens the whole piece."""


def share_pool(pool: KVPool) -> PoolIpcMemory | None:
    """The pool's device for the bridge; None for a pool on a CPU. Raises OSError without CUDA's driver."""
    if pool.device.type != "cuda":
        return None
    index = pool.device.index if pool.device.index is not None else torch.cuda.current_device()
    return PoolIpcMemory(pool, CudaIpcSource(index, CudaDriver(index, load_driver())))


class CudaIpcSource:
    """Of `cuda:index`."""

    def __init__(self, index: int, driver: CudaDriver) -> None:
        self._index = index
        self._driver = driver
        self._reachable = driver.reachable()
        self.device_id = driver.uuid()

    def can_reach(self, device_id: str) -> bool:
        return device_id in self._reachable

    def allocate(self, num_bytes: int) -> CudaBytes:
        size = -(-num_bytes // _GRANULE) * _GRANULE
        address = self._driver.allocate(size)
        try:
            handle = os.getpid().to_bytes(8, "little") + self._driver.export(address)
        except BaseException:
            self._driver.free(address)
            raise
        return CudaBytes(self._driver, self._index, address, num_bytes, handle)

    def open(self, handle: bytes, num_bytes: int) -> CudaBytes:
        if len(handle) != 8 + HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        if int.from_bytes(handle[:8], "little") == os.getpid():
            raise OSError("a handle cannot be opened in the process that has exported it")
        return CudaBytes(self._driver, self._index, self._driver.open(handle[8:]), num_bytes, b"")


class CudaBytes:
    """SharedBytes: an own allocation (its handle is not empty), or a mapping of somebody else's."""

    def __init__(self, driver: CudaDriver, index: int, address: int, num_bytes: int, handle: bytes) -> None:
        self.handle = handle
        self._driver = driver
        self._address = address
        # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, by which torch takes foreign
        # memory without a copy; with stream None it does not synchronise
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }
        self._index = index

    @property
    def data(self) -> torch.Tensor:
        return torch.as_tensor(self, device=f"cuda:{self._index}")

    def close(self) -> None:
        if self.handle:
            self._driver.free(self._address)
        else:
            self._driver.unmap(self._address)
