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
    return PoolIpcMemory(pool, CudaIpcSource(CudaDriver(index, load_driver())))


class CudaIpcSource:
    """Of the driver's device."""

    def __init__(self, driver: CudaDriver) -> None:
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
            return CudaBytes(self._driver, address, num_bytes, handle)
        except BaseException:
            self._driver.free(address)
            raise

    def open(self, handle: bytes, num_bytes: int) -> CudaBytes:
        if len(handle) != 8 + HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        if int.from_bytes(handle[:8], "little") == os.getpid():
            raise OSError("a handle cannot be opened in the process that has exported it")
        address = self._driver.open(handle[8:])
        try:
            return CudaBytes(self._driver, address, num_bytes, b"")
        except BaseException:
            self._driver.unmap(address)
            raise


class CudaBytes:
    """SharedBytes: an own allocation (its handle is not empty), or a mapping of somebody else's."""

    def __init__(self, driver: CudaDriver, address: int, num_bytes: int, handle: bytes) -> None:
        self.handle = handle
        self._driver = driver
        self._address = address
        self._index = driver.index_of(address)
        # by which torch takes foreign memory without a copy:
        # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }

    @property
    def data(self) -> torch.Tensor:
        """Raises OSError if torch would rather have a copy of it."""
        found = torch.as_tensor(self, device=f"cuda:{self._index}")
        if found.data_ptr() != self._address:
            raise OSError(f"torch does not take memory of cuda:{self._index} as it lies there")
        return found

    def close(self) -> None:
        if self.handle:
            self._driver.free(self._address)
        else:
            self._driver.unmap(self._address)
