"""The handshake over which prefill gets staging memory from a decode worker of its host.

Over a Unix socket in the abstract namespace, which leaves no file behind, with a random name: prefill says
who it is and what it wants, decode passes a memfd, and each tells the other what the other wrote into it.
From then on nothing is said: the connection lives as long as the one that may write lives, and its end frees
the memory. Messages are fixed structs, one packet each. Owns the messages and prefill's side; decode's is
`shm_acceptor`. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from core.ids import Epoch
from kv_transfer.shm_memory import NONCE_BYTES, StagingMemory
from kv_transfer.staging import watch_connection
from kv_transfer.transport import Place, StagingAddress

T = TypeVar("T")

_MAGIC = b"BatonSM1"
# magic, token, receiver epoch, sender epoch, bytes of slots
_HELLO = struct.Struct("<8s16sQQQ")
# magic, status, staging id
_GRANT = struct.Struct("<8sQQ")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
TOKEN_BYTES = 16
MAX_PACKET_BYTES = 256


class Fallback(StrEnum):
    """Why a payload goes over gRPC although shared memory was wanted; the label of a metric."""

    NOT_OFFERED = "not_offered"  # decode does not listen: switched off, or its system cannot
    OTHER_HOST = "other_host"
    UNREACHABLE = "unreachable"  # same host, but another network namespace
    REFUSED = "refused"  # another user, another incarnation, not the token that decode gave
    LIMIT = (
        "limit"  # no room for another pair, or no descriptor, or a block is larger than the staging memory
    )
    UNSUPPORTED = "unsupported"  # the system has or allows no memfd, or does not map it
    TIMEOUT = "timeout"
    BROKEN = "broken"  # the peer does not speak this protocol, or does not see the same memory
    LOST = "lost"  # it was attached, and then decode closed it or did not let go of its slots


_STATUS = {Fallback.REFUSED: 1, Fallback.LIMIT: 2, Fallback.UNSUPPORTED: 3}
_GRANTED = 0


class NotAttached(Exception):
    """There is no shared memory with this peer; `reason` says why."""

    def __init__(self, reason: Fallback, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Hello:
    """Prefill's first packet."""

    token: bytes
    receiver_epoch: Epoch
    sender_epoch: Epoch
    num_bytes: int

    def encode(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.token, self.receiver_epoch, self.sender_epoch, self.num_bytes)

    @staticmethod
    def decode(data: bytes) -> Hello | None:
        if len(data) != _HELLO.size:
            return None
        magic, token, receiver, sender, num_bytes = _HELLO.unpack(data)
        return Hello(token, Epoch(receiver), Epoch(sender), num_bytes) if magic == _MAGIC else None


def encode_grant(staging_id: int) -> bytes:
    return _GRANT.pack(_MAGIC, _GRANTED, staging_id)


def encode_refusal(reason: Fallback) -> bytes:
    return _GRANT.pack(_MAGIC, _STATUS[reason], 0)


def decode_grant(data: bytes) -> int:
    """The staging id; raises NotAttached."""
    if not data:
        raise NotAttached(Fallback.REFUSED, "decode closed the connection")
    if len(data) != _GRANT.size:
        raise NotAttached(Fallback.BROKEN, f"an answer of {len(data)} bytes")
    magic, status, staging_id = _GRANT.unpack(data)
    if magic != _MAGIC:
        raise NotAttached(Fallback.BROKEN, "an answer of another protocol")
    if status != _GRANTED:
        reasons = {number: reason for reason, number in _STATUS.items()}
        raise NotAttached(reasons.get(status, Fallback.REFUSED), "decode refused")
    return int(staging_id)


def host_id() -> str:
    """The same for all containers of one running kernel, and for nothing else; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def obstacle_of(address: StagingAddress | None) -> Fallback | None:
    """Why memory there cannot be had from this host, if that is known without asking."""
    if address is None:
        return Fallback.NOT_OFFERED
    return None if address.host_id and address.host_id == host_id() else Fallback.OTHER_HOST


def peer_uid(connection: socket.socket) -> int:
    """The user that the peer ran as when it connected or listened, as the kernel says."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


@dataclass(frozen=True, slots=True)
class Attachment:
    """Memory that this process may write, and the connection whose end gives it back."""

    staging_id: int
    memory: StagingMemory
    connection: socket.socket

    @property
    def slots(self) -> memoryview:
        return self.memory.slots

    def place(self, offset: int) -> Place:
        return Place(self.staging_id, offset)

    def publish(self, place: Place, offset: int, num_bytes: int) -> None:
        """Decode sees the same memory."""

    def watch(self, on_end: Callable[[], None]) -> None:
        watch_connection(self.connection, on_end)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.connection)
        self.memory.close()
        self.connection.close()


async def attach(
    address: StagingAddress, receiver_epoch: Epoch, sender_epoch: Epoch, num_bytes: int, timeout_s: float
) -> Attachment:
    """Get `num_bytes` of staging memory from the decode worker that listens there. Raises NotAttached."""
    hello = Hello(address.token, receiver_epoch, sender_epoch, num_bytes)
    return await dial(lambda connection: _attach(connection, address.socket_name, hello), timeout_s)


async def dial(handshake: Callable[[socket.socket], Awaitable[T]], timeout_s: float) -> T:
    """What `handshake` makes of a new connection, which is closed if it fails. Raises NotAttached."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (OSError, AttributeError) as error:
        raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
    try:
        async with asyncio.timeout(timeout_s):
            return await handshake(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise NotAttached(Fallback.TIMEOUT, f"no answer within {timeout_s:g} s") from error
        if isinstance(error, ConnectionError):
            raise NotAttached(Fallback.REFUSED, "decode closed the connection") from error
        if isinstance(error, OSError):
            raise NotAttached(Fallback.BROKEN, repr(error)) from error
        raise


async def _attach(connection: socket.socket, name: str, hello: Hello) -> Attachment:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, f"\0{name}")
    except OSError as error:
        raise NotAttached(Fallback.UNREACHABLE, repr(error)) from error
    if peer_uid(connection) != os.geteuid():
        raise NotAttached(Fallback.REFUSED, "the socket belongs to another user")
    await loop.sock_sendall(connection, hello.encode())
    data, descriptor = await _receive_descriptor(connection)
    try:
        staging_id = decode_grant(data)
        if descriptor is None:
            raise NotAttached(Fallback.LIMIT, "the memory's descriptor did not arrive")
        try:
            memory = StagingMemory(descriptor, hello.num_bytes, is_writable=True)
        except OSError as error:
            raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        memory.write_prefill_nonce(nonce)
        await loop.sock_sendall(connection, memory.decode_nonce)
        if await loop.sock_recv(connection, MAX_PACKET_BYTES) != nonce:
            raise NotAttached(Fallback.BROKEN, "decode does not see what was written")
    except BaseException:
        memory.close()
        raise
    return Attachment(staging_id, memory, connection)


async def _receive_descriptor(connection: socket.socket) -> tuple[bytes, int | None]:
    """The next packet and the descriptor that came with it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                connection, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection, _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)
        else:
            return data, descriptors[0] if descriptors else None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
