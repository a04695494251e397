"""IpcAcceptor: decode's staging memory on its device, one for each prefill process of this host that asks.

Memory of a device is not as forgiving as a memfd: freed while another process still copies into it, it may be
somebody else's when the copy arrives. So it is freed only when that process has said that it has unmapped it,
or is gone; a stopped one keeps it. What is left when this closes is left to the end of this process. Lives on
the IO loop; what the device does, on its thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from core.errors import InvalidConfig
from core.ids import Epoch
from kv_transfer.config import CudaIpc, ReceiverConfig
from kv_transfer.device_memory import DeviceRegion
from kv_transfer.device_thread import DeviceSpan, DeviceThread
from kv_transfer.ipc_handshake import GOODBYE, HEAD_BYTES, encode_device_grant
from kv_transfer.receiver import Receiver
from kv_transfer.shm_handshake import MAX_PACKET_BYTES, Fallback, Hello, NotAttached
from kv_transfer.shm_memory import NONCE_BYTES
from kv_transfer.staging_acceptor import StagingAcceptor
from kv_transfer.transport import CUDA_IPC, OfferedStaging

_log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class LentRegion:
    """One pair's memory; `writer` is a descriptor of the process that may write to it."""

    region: DeviceRegion
    slots: DeviceSpan
    prefill_nonce: bytes
    writer: int


def offer_device_memory(receiver: Receiver, config: ReceiverConfig, device: DeviceThread | None) -> None:
    """Let `receiver` take payloads through memory of its device, as `config` says; on the running loop.

    Without a device, or where the system cannot, it goes without, and says so. Raises InvalidConfig if it is
    required.
    """
    if config.cuda_ipc is CudaIpc.NEVER:
        return
    problem = "this worker's blocks are not on a device that shares memory"
    if device is not None:
        try:
            acceptor = IpcAcceptor(
                receiver.epoch,
                config.max_device_staging_bytes,
                receiver.metrics.set_device_staging_bytes,
                device,
            )
        except (OSError, AttributeError) as error:
            problem = repr(error)
            _log.warning("no memory of the device for prefill workers of this host: %s", problem)
        else:
            receiver.admit(acceptor)
            return
    if config.cuda_ipc is CudaIpc.REQUIRED:
        raise InvalidConfig(f"bridge.cuda_ipc is required, but cannot be had: {problem}")


class IpcAcceptor(StagingAcceptor[LentRegion]):
    """Raises OSError or AttributeError, too, where a process's end cannot be seen (Linux before 5.3)."""

    def __init__(
        self, own_epoch: Epoch, max_bytes: int, on_bytes: Callable[[int], None], device: DeviceThread
    ) -> None:
        self.label, self.is_on_device = CUDA_IPC, True
        os.close(os.pidfd_open(os.getpid()))
        self._device = device
        self._is_closing = False
        super().__init__(own_epoch, max_bytes, on_bytes)
        self.address = replace(self.address, device_id=device.memory.device_id)

    def offer(self, offered: OfferedStaging) -> OfferedStaging:
        return replace(offered, device=self.address)

    async def lend(self, connection: socket.socket, hello: Hello, staging_id: int) -> LentRegion:
        loop = asyncio.get_running_loop()
        writer = _open_peer(connection)
        try:
            region = await self._allocate(HEAD_BYTES + hello.num_bytes)
        except BaseException:
            os.close(writer)
            raise
        nonce, last_word = secrets.token_bytes(NONCE_BYTES), b""
        try:
            await self._device.call(region.write, 0, nonce)
            await loop.sock_sendall(connection, encode_device_grant(staging_id, region.handle))
            last_word = await loop.sock_recv(connection, MAX_PACKET_BYTES)
            if not secrets.compare_digest(last_word, nonce):
                raise OSError("it does not see what was written into the memory")
            theirs = await self._device.call(region.read, NONCE_BYTES, NONCE_BYTES)
        except BaseException as error:
            self._settle(region, writer, last_word == GOODBYE)
            if isinstance(error, RuntimeError):
                raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
            raise
        slots = DeviceSpan(self._device, region, HEAD_BYTES, hello.num_bytes, _nothing)
        return LentRegion(region, slots, theirs, writer)

    async def take_back(self, connection: socket.socket, memory: LentRegion, last_word: bytes) -> None:
        await self._free(memory.region, memory.writer, last_word == GOODBYE)

    async def close(self) -> None:
        """Prefill workers see their connections end, and let go; of what they do not, nothing is freed."""
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_WR)
        if self.serving:
            await asyncio.wait(self.serving, timeout=_GOODBYE_S)
        self._is_closing = True
        if self._num_bytes:
            _log.warning("%d bytes of the device are left to writers that have not let go", self._num_bytes)
        await super().close()

    async def _allocate(self, num_bytes: int) -> DeviceRegion:
        try:
            return await self._device.call(self._device.memory.allocate, num_bytes)
        except (OSError, RuntimeError) as error:
            raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error

    def _settle(self, region: DeviceRegion, writer: int, is_unmapped: bool) -> None:
        """Free it in the background, after a handshake that failed: nobody waits for it."""
        task = asyncio.create_task(self._free(region, writer, is_unmapped))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def _free(self, region: DeviceRegion, writer: int, is_unmapped: bool) -> None:
        try:
            if not is_unmapped:
                if self._is_closing:
                    return
                await _ended(writer)
            await self._device.call(region.close)
        except (OSError, RuntimeError) as error:
            _log.warning("staging memory of the device could not be freed: %r", error)
        finally:
            os.close(writer)


def _nothing() -> None:
    """The frame is refused; its sender gives the memory up."""


def _open_peer(connection: socket.socket) -> int:
    """A descriptor of the process at the other end. Raises NotAttached when it cannot be seen from here."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    try:
        return os.pidfd_open(_CREDENTIALS.unpack(data)[0])
    except (OSError, ValueError) as error:  # process id 0: it lives where this process cannot see it
        raise NotAttached(Fallback.UNSUPPORTED, f"its process cannot be watched: {error!r}") from error


async def _ended(process: int) -> None:
    """Wait until the process is gone, and with it all that it had open or mapped."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process)
