"""How prefill gets staging memory on decode's device: the handshake of shared memory, but what decode passes
on is the device's handle, and the nonces lie on the device.

The connection lives as long as the one that may write. Whoever lets go of the memory in order says so
(`GOODBYE`) after its last copy has ended and the memory is unmapped: only then, or when its process is gone,
decode frees it. Lives on the IO loop; what the device does, on its thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from kv_transfer.device_memory import DeviceRegion
from kv_transfer.device_thread import DeviceSpan, DeviceThread
from kv_transfer.shm_handshake import (
    MAX_PACKET_BYTES,
    Fallback,
    Hello,
    NotAttached,
    decode_grant,
    dial,
    encode_grant,
    peer_uid,
)
from kv_transfer.shm_memory import NONCE_BYTES
from kv_transfer.staging import watch_connection
from kv_transfer.transport import Place, StagingAddress

_log = logging.getLogger(__name__)

HEAD_BYTES = 4096
"""Before the slots: decode's nonce, then prefill's."""
GOODBYE = b"goodbye"
_GRANT_BYTES = len(encode_grant(0))


def encode_device_grant(staging_id: int, handle: bytes) -> bytes:
    grant = encode_grant(staging_id) + handle
    assert len(grant) <= MAX_PACKET_BYTES
    return grant


class OpenedRegion:
    """Decode's memory at prefill, and the connection whose end gives it back."""

    def __init__(
        self, thread: DeviceThread, region: DeviceRegion, staging_id: int, connection: socket.socket
    ) -> None:
        self.staging_id = staging_id
        self.connection = connection
        self._thread = thread
        self._region = region
        self._loop = asyncio.get_running_loop()
        num_bytes = region.num_bytes - HEAD_BYTES
        self.slots = DeviceSpan(thread, region, HEAD_BYTES, num_bytes, self.break_off)

    def break_off(self) -> None:
        """Have it heard as the end of the connection, which it leads to."""
        with suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RD)

    def place(self, offset: int) -> Place:
        return Place(self.staging_id, offset)

    def publish(self, place: Place, offset: int, num_bytes: int) -> None:
        """Decode sees the same memory."""

    def watch(self, on_end: Callable[[], None]) -> None:
        watch_connection(self.connection, on_end)

    def close(self) -> None:
        """Unmap the memory after the copies under way, then say so."""
        self._loop.remove_reader(self.connection)
        self._thread.post(self._region.close).add_done_callback(self._tell)

    def _tell(self, closing: Future[None]) -> None:
        if (error := closing.exception()) is not None:  # decode waits for this process's end
            _log.warning("staging memory of the device could not be unmapped: %r", error)
        else:
            with suppress(OSError):  # decode is gone
                self.connection.send(GOODBYE)
        self.connection.close()


async def attach_device(
    thread: DeviceThread, address: StagingAddress, hello: Hello, timeout_s: float
) -> OpenedRegion:
    """Get `hello.num_bytes` of it from the decode worker that listens there. Raises NotAttached."""
    if not thread.memory.can_reach(address.device_id):
        raise NotAttached(Fallback.UNREACHABLE, f"device {address.device_id} is no peer of this one")
    return await dial(lambda connection: _attach(thread, connection, address.socket_name, hello), timeout_s)


async def _attach(thread: DeviceThread, connection: socket.socket, name: str, hello: Hello) -> OpenedRegion:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, f"\0{name}")
    except OSError as error:
        raise NotAttached(Fallback.UNREACHABLE, repr(error)) from error
    if peer_uid(connection) != os.geteuid():
        raise NotAttached(Fallback.REFUSED, "the socket belongs to another user")
    await loop.sock_sendall(connection, hello.encode())
    grant = await loop.sock_recv(connection, MAX_PACKET_BYTES)
    staging_id, handle = decode_grant(grant[:_GRANT_BYTES]), grant[_GRANT_BYTES:]
    try:
        region = await thread.call(thread.memory.open, handle, HEAD_BYTES + hello.num_bytes)
    except (OSError, RuntimeError) as error:
        # decode frees the memory of one who says goodbye; it was never mapped here
        await loop.sock_sendall(connection, GOODBYE)
        raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await thread.call(region.write, NONCE_BYTES, nonce)
        await loop.sock_sendall(connection, await thread.call(region.read, 0, NONCE_BYTES))
        if await loop.sock_recv(connection, MAX_PACKET_BYTES) != nonce:
            raise NotAttached(Fallback.BROKEN, "decode does not see what was written")
    except RuntimeError as error:
        thread.post(region.close)
        raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
    except BaseException:
        thread.post(region.close)
        raise
    return OpenedRegion(thread, region, staging_id, connection)
