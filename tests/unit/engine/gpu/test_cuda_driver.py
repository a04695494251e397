"""The calls of CUDA's driver, against a double of its library: which, in which order, what their errors say.

That a real driver does what they ask for can only be seen on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from engine.gpu.cuda_driver import HANDLE_BYTES, CudaDriver, IpcMemHandle
from engine.gpu.ipc_cuda import CudaIpcSource

GRANULE = 2 << 20


class Library:
    """Two devices that are peers, a third that is not; writes through the pointers it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        self.depth = 0
        self.live: dict[int, int] = {}
        self.opened: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        target = arguments[0]._obj if hasattr(arguments[0], "_obj") else None
        if name == "cuDeviceGet":
            target.value = arguments[1]
        elif name == "cuDeviceGetCount":
            target.value = 3
        elif name == "cuDeviceGetUuid_v2":
            ctypes.memmove(ctypes.addressof(target), bytes([arguments[1].value + 1] * 16), 16)
        elif name == "cuDeviceCanAccessPeer":
            target.value = int(arguments[2].value == 1)
        elif name == "cuCtxPushCurrent_v2":
            self.depth += 1
        elif name == "cuCtxPopCurrent_v2":
            self.depth -= 1
        elif name == "cuMemAlloc_v2":
            target.value = 0x7000_0000_0000 + len(self.calls) * GRANULE
            self.live[target.value] = arguments[1]
        elif name in ("cuMemFree_v2", "cuIpcCloseMemHandle"):
            del self.live[arguments[0]]
        elif name == "cuIpcGetMemHandle":
            ctypes.memmove(ctypes.addressof(target), bytes(range(HANDLE_BYTES)), HANDLE_BYTES)
        elif name == "cuIpcOpenMemHandle_v2":
            assert isinstance(arguments[1], IpcMemHandle), "the handle is passed by value"
            assert arguments[2] == 1
            self.opened.append(bytes(arguments[1]))
            target.value = 0x7100_0000_0000
            self.live[target.value] = 0
        elif name == "cuPointerGetAttribute":
            target.value = 1 if arguments[2] >= 0x7100_0000_0000 else 0
        elif name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_MAP_FAILED"


class Function:
    argtypes: list[Any]
    restype: Any

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes)
        self._library.calls.append(self._name)
        if self._name.startswith(("cuMem", "cuIpc")):
            assert self._library.depth == 1, "memory is asked for in the device's context"
        if (status := self._library.failing.get(self._name, 0)) == 0:
            self._library.answer(self._name, arguments)
        return status


def source(library: Library, index: int = 0) -> CudaIpcSource:
    return CudaIpcSource(CudaDriver(index, library))


def test_a_device_is_known_by_its_uuid_and_reaches_itself_and_its_peers() -> None:
    found = source(Library())
    assert found.device_id == "01" * 16
    assert [found.can_reach(f"{number:02x}" * 16) for number in (1, 2, 3)] == [True, True, False]


def test_an_allocation_is_whole_pieces_of_the_drivers_so_that_its_handle_opens_nothing_else() -> None:
    library = Library()
    memory = source(library).allocate(GRANULE + 1)
    assert list(library.live.values()) == [2 * GRANULE]
    assert memory.handle == os.getpid().to_bytes(8, "little") + bytes(range(HANDLE_BYTES))
    assert memory.__cuda_array_interface__["shape"] == (GRANULE + 1,)
    memory.close()
    assert library.live == {}
    assert [name for name in library.calls if name.startswith("cuMem")] == ["cuMemAlloc_v2", "cuMemFree_v2"]
    assert library.depth == 0


def test_what_is_opened_is_unmapped_and_never_freed() -> None:
    library = Library()
    handle = (os.getpid() + 1).to_bytes(8, "little") + bytes(HANDLE_BYTES)
    memory = source(library).open(handle, 5)
    assert library.opened == [bytes(HANDLE_BYTES)]
    memory.close()
    assert "cuMemFree_v2" not in library.calls
    assert library.calls[-2] == "cuIpcCloseMemHandle"


def test_a_process_does_not_open_its_own_handle_nor_something_else() -> None:
    found = source(Library())
    with pytest.raises(OSError, match="exported"):
        found.open(found.allocate(1).handle, 1)
    with pytest.raises(OSError, match="handle of 3 bytes"):
        found.open(b"abc", 1)


def test_an_error_names_the_call_and_leaves_no_context_current_and_no_memory_behind() -> None:
    library = Library()
    found = source(library)
    library.failing["cuIpcGetMemHandle"] = 205
    with pytest.raises(OSError, match=r"cuIpcGetMemHandle: CUDA_ERROR_MAP_FAILED \(205\)"):
        found.allocate(1)
    assert (library.depth, library.live) == (0, {})
    library.failing = {"cuPointerGetAttribute": 1}
    with pytest.raises(OSError, match="cuPointerGetAttribute"):
        found.open((os.getpid() + 1).to_bytes(8, "little") + bytes(HANDLE_BYTES), 5)
    assert (library.depth, library.live) == (0, {})


def test_memory_of_a_peer_is_known_to_lie_on_the_peer() -> None:
    driver = CudaDriver(0, Library())
    assert driver.index_of(driver.open(bytes(HANDLE_BYTES))) == 1
    assert driver.index_of(driver.allocate(GRANULE)) == 0


def test_a_driver_without_the_calls_is_no_driver() -> None:
    class Old(Library):
        def __getattr__(self, name: str) -> Any:
            if name == "cuIpcOpenMemHandle_v2":
                raise AttributeError(name)
            return super().__getattr__(name)

    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2"):
        CudaDriver(0, Old())
