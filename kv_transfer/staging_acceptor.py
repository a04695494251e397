"""StagingAcceptor: decode's staging memory, one for each prefill process of this host that asks.

Owns the listening socket, the memories and their bound. A memory is made for one incarnation of prefill, only
frames of that incarnation are served from it, and it is given back when the connection over which it was
passed has ended: until then its writer, however long it is stopped, can write to nothing else. Lives on the
IO loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from core.errors import TransferCorrupt
from core.ids import Epoch
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.shm_handshake import (
    MAX_PACKET_BYTES,
    TOKEN_BYTES,
    Fallback,
    Hello,
    NotAttached,
    encode_refusal,
    host_id,
    peer_uid,
)
from kv_transfer.shm_slots import Sliceable
from kv_transfer.transport import Place, StagingAddress

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 2.0
_ACCEPT_AGAIN_S = 1.0
_MAX_GREETING = 64  # connections that have not said who they are


class LentMemory(Protocol):
    """One pair's memory, at decode; `prefill_nonce` is what prefill wrote into it."""

    @property
    def slots(self) -> Sliceable: ...

    @property
    def prefill_nonce(self) -> bytes: ...


M = TypeVar("M", bound=LentMemory)


@dataclass(frozen=True, slots=True)
class _Grant(Generic[M]):
    sender_epoch: Epoch
    memory: M


class StagingAcceptor(ABC, Generic[M]):
    """Listens from its construction on, which raises OSError or AttributeError where the system has no
    abstract Unix sockets. How memory is lent and taken back is its subclasses' business.
    """

    def __init__(
        self,
        own_epoch: Epoch,
        max_bytes: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        """`on_bytes` hears how many bytes are lent, whenever that changes."""
        self._own_epoch = own_epoch
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._num_bytes = 0
        self._num_greeting = 0
        self._grants: dict[int, _Grant[M]] = {}
        name, host = f"baton-{secrets.token_hex(16)}", host_id()
        if not host:
            raise OSError("this host has no boot id")
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.address = StagingAddress(host, name, self._token)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self.serving: set[asyncio.Task[None]] = set()  # one for each connection
        self.connections: set[socket.socket] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="accept staging")

    @abstractmethod
    async def lend(self, connection: socket.socket, hello: Hello, staging_id: int) -> M:
        """Make the memory, tell the peer of it, and see it prove that both see the same. Raises NotAttached,
        OSError.
        """

    @abstractmethod
    async def take_back(self, connection: socket.socket, memory: M, last_word: bytes) -> None:
        """The connection has ended, `last_word` was said on it last: free the memory when nobody can write to
        it any more.
        """

    @property
    def num_bytes(self) -> int:
        """Granted and not given back."""
        return self._num_bytes

    async def find(self, place: Place, num_bytes: int, sender_epoch: Epoch) -> memoryview | DeviceSpan | None:
        """See StagingArea. Raises TransferCorrupt for a place outside the memory."""
        grant = self._grants.get(place.staging_id)
        if grant is None or grant.sender_epoch != sender_epoch:
            return None
        end = place.offset + num_bytes
        if end > len(grant.memory.slots):
            raise TransferCorrupt("a payload lies outside its staging memory", offset=place.offset)
        found: memoryview | DeviceSpan = grant.memory.slots[place.offset : end]
        return found

    async def close(self) -> None:
        """Give everything back; prefill workers see their connections end and send over gRPC."""
        tasks = [self._accepting, *self.serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor left, for example
                _log.warning("a prefill worker could not attach: %r", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            # another user's process gets nothing, not even a descriptor for the time of a handshake
            if peer_uid(connection) != os.geteuid() or self._num_greeting >= _MAX_GREETING:
                _log.info("a connection for staging memory is closed: another user's, or too many at once")
                connection.close()
                continue
            self._num_greeting += 1
            task = asyncio.create_task(self._serve(connection))
            self.serving.add(task)
            task.add_done_callback(self.serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One prefill process, until its end of the connection is closed, by itself or by its death."""
        loop = asyncio.get_running_loop()
        with connection, self._noted(connection):
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    hello = await self._hello(connection)
            except NotAttached as error:
                _log.warning("a process may not attach: %s", error)
                await self._refuse(connection, error.reason)
                return
            except (OSError, TimeoutError) as error:
                _log.warning("a process did not attach: %r", error)
                return
            finally:
                self._num_greeting -= 1
            staging_id = secrets.randbits(64)
            self._count(hello.num_bytes)
            last_word = b""
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    memory = await self.lend(connection, hello, staging_id)
                self._grants[staging_id] = _Grant(hello.sender_epoch, memory)
                await loop.sock_sendall(connection, memory.prefill_nonce)
                while said := await loop.sock_recv(connection, MAX_PACKET_BYTES):
                    last_word = said
            except NotAttached as error:
                _log.warning("a process could not attach: %s", error)
                await self._refuse(connection, error.reason)
            except (OSError, TimeoutError) as error:
                _log.info("the connection of staging %x broke: %r", staging_id, error)
            finally:
                if (grant := self._grants.pop(staging_id, None)) is not None:
                    await self.take_back(connection, grant.memory, last_word)
                self._count(-hello.num_bytes)

    @contextmanager
    def _noted(self, connection: socket.socket) -> Iterator[None]:
        self.connections.add(connection)
        try:
            yield
        finally:
            self.connections.discard(connection)

    async def _hello(self, connection: socket.socket) -> Hello:
        """Whoever may attach; raises NotAttached."""
        loop = asyncio.get_running_loop()
        hello = Hello.decode(await loop.sock_recv(connection, MAX_PACKET_BYTES))
        if hello is None or not secrets.compare_digest(hello.token, self._token):
            raise NotAttached(Fallback.REFUSED, "it was not told the token")
        if hello.receiver_epoch != self._own_epoch:
            raise NotAttached(Fallback.REFUSED, "it means another incarnation")
        if hello.num_bytes < 1 or self._num_bytes + hello.num_bytes > self._max_bytes:
            raise NotAttached(Fallback.LIMIT, f"{self._num_bytes} of {self._max_bytes} bytes are granted")
        return hello

    async def _refuse(self, connection: socket.socket, reason: Fallback) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(connection, encode_refusal(reason))
        except OSError as error:
            _log.info("a refused process did not wait for its answer: %r", error)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._on_bytes(self._num_bytes)
