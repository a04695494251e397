"""HostIpcSource: shared memory of the host where there is no GPU, for the same code; a MemorySource.

As the kernels run in Triton's interpreter on a CPU, so do the copies of the bridge between devices: two
processes, real handles, real faults. Only the driver's calls are others. Used in tests and dry runs: workers
on CPUs have the bridge's own shared memory.
"""

from __future__ import annotations

import mmap
import os

import torch


class HostIpcSource:
    """A handle says which descriptor of which process it is: that process must be this user's."""

    device_id = "host"

    def can_reach(self, device_id: str) -> bool:
        return device_id == self.device_id

    def allocate(self, num_bytes: int) -> HostBytes:
        descriptor = os.memfd_create("baton-device", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            return HostBytes(descriptor, num_bytes, f"{os.getpid()}:{descriptor}".encode())
        except BaseException:
            os.close(descriptor)
            raise

    def open(self, handle: bytes, num_bytes: int) -> HostBytes:
        try:
            process, number = (int(part) for part in handle.decode().split(":"))
        except ValueError as error:
            raise OSError("no such handle") from error
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                raise OSError("the memory does not have the size that was agreed")
            return HostBytes(descriptor, num_bytes, b"")
        except BaseException:
            os.close(descriptor)
            raise


class HostBytes:
    """SharedBytes; `descriptor` is its own from here on."""

    def __init__(self, descriptor: int, num_bytes: int, handle: bytes) -> None:
        self.handle = handle
        self._descriptor = descriptor
        # unmapped with the last tensor over it
        self.data = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        del self.data
        os.close(self._descriptor)
