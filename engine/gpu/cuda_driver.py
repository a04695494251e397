"""The calls of CUDA's driver by which two processes share an allocation, over ctypes.

Owns argument types and errors; knows no tensor. Allocations are the driver's own and never torch's: a handle
is of a whole allocation, while a tensor lies somewhere in one of torch's, or in an expandable segment, which
has no such handle. Signatures: CUDA driver API, "Memory Management". Every call makes the device's
primary context, which is torch's too, current for its time. Usable from any thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle; it is passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_char * 16),)


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetUuid_v2": [POINTER(Uuid), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuIpcGetMemHandle": [POINTER(IpcMemHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), IpcMemHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


def load_driver() -> Any:
    """The driver's library. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


class CudaDriver:
    """The device that torch calls `cuda:index`. Errors are OSErrors that name the call."""

    def __init__(self, index: int, library: Any) -> None:
        self._library = library
        for name, types in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise OSError(f"the CUDA driver has no {name}") from error
            function.argtypes, function.restype = types, c_int
        self._call("cuInit", 0)
        self._device = self._device_at(index)
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)

    def uuid(self) -> str:
        """The device's, as 32 hexadecimal digits: indexes differ between processes, this does not."""
        return self._uuid_of(self._device)

    def reachable(self) -> set[str]:
        """The UUIDs of this device and of its peers, as far as this process sees them."""
        count, found = c_int(), {self.uuid()}
        self._call("cuDeviceGetCount", byref(count))
        for index in range(count.value):
            other, can = self._device_at(index), c_int()
            if other.value != self._device.value:
                self._call("cuDeviceCanAccessPeer", byref(can), self._device, other)
                if can.value:
                    found.add(self._uuid_of(other))
        return found

    def allocate(self, num_bytes: int) -> int:
        """The address of a new allocation on the device."""
        address = c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", byref(address), num_bytes)
        return int(address.value)

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The handle of an allocation, `address` being its first byte; HANDLE_BYTES."""
        handle = IpcMemHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address at which another process's allocation is mapped."""
        address = c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                byref(address),
                IpcMemHandle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return int(address.value)

    def unmap(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    def index_of(self, address: int) -> int:
        """The index of the device on which the memory is: another one, for what a peer has exported."""
        index = c_int()
        with self._current():
            self._call("cuPointerGetAttribute", byref(index), _DEVICE_ORDINAL, address)
        return index.value

    def _device_at(self, index: int) -> c_int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), index)
        return device

    def _uuid_of(self, device: c_int) -> str:
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), device)
        return bytes(uuid).hex()

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
