"""GroupAttachment: prefill's end of a pair's process group, and how it is formed.

Owns the stream on which the group is agreed upon and its payloads are announced, and the thread that sends
them, in the order of the announcements: decode receives in that order. Lives on the IO loop, sends on its
thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from core.errors import ServingError
from kv_transfer.device_thread import CallThread, DeviceSpan
from kv_transfer.group_messages import NONCE_BYTES, GroupLine, decode_message, next_message
from kv_transfer.key_exchange import KeyExchange
from kv_transfer.pair_group import PREFILL_RANK, Groups, PairGroup
from kv_transfer.shm_handshake import Fallback, NotAttached
from kv_transfer.transport import Pair, Place, PushStream
from protos import kv_transfer_pb2 as pb

_log = logging.getLogger(__name__)


class OpensGroups(Protocol):
    """A connection to decode."""

    def open_group(self) -> PushStream: ...


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Seconds that forming a group and one payload may take."""

    attach_s: float
    op_s: float


async def attach_group(
    groups: Groups, connection: OpensGroups, pair: Pair, num_bytes: int, limits: GroupLimits
) -> GroupAttachment:
    """Form a group with decode, with `num_bytes` of memory at both ends. Raises NotAttached."""
    stream = connection.open_group()
    attachment = GroupAttachment(stream)
    try:
        async with asyncio.timeout(limits.attach_s):
            await attachment.form(groups, pair, num_bytes, limits)
    except BaseException as error:
        attachment.close()
        if isinstance(error, TimeoutError):
            raise NotAttached(Fallback.TIMEOUT, f"no group within {limits.attach_s:g} s") from error
        if isinstance(error, ServingError):
            raise NotAttached(Fallback.UNREACHABLE, error.message) from error
        if isinstance(error, (OSError, RuntimeError)):
            raise NotAttached(Fallback.BROKEN, repr(error)) from error
        raise
    return attachment


class GroupAttachment:
    """Attached: what is published is sent; `watch` hears when the group has broken."""

    def __init__(self, stream: PushStream) -> None:
        self.staging_id = 0
        self._stream = stream
        self._messages = stream.acks()
        self._line = GroupLine(stream.send)
        self._keys = KeyExchange(self._line.tell_key)
        self._loop = asyncio.get_running_loop()
        self._thread, self._copies = CallThread("group sends"), CallThread("group copies")
        self._group: PairGroup | None = None
        self._slots: memoryview | DeviceSpan | None = None
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._is_ended = False

    @property
    def slots(self) -> memoryview | DeviceSpan:
        assert self._slots is not None
        return self._slots

    async def form(self, groups: Groups, pair: Pair, num_bytes: int, limits: GroupLimits) -> None:
        """Once. Raises NotAttached, OSError, RuntimeError, or what the connection broke with."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = pb.GroupHello(
            receiver_epoch=pair.decode.epoch,
            sender_epoch=pair.prefill.epoch,
            backend=groups.backend,
            num_bytes=num_bytes,
            nonce=nonce,
        )
        self._line.post(pb.GroupMessage(hello=hello))
        message = await next_message(self._messages)
        if message.WhichOneof("kind") != "grant":
            raise NotAttached(Fallback.BROKEN, "an answer of another protocol")
        grant = message.grant
        self.staging_id = grant.group_id
        self._reading = self._loop.create_task(self._read(), name="group messages")
        forming = self._thread.post(
            form_proven, groups, PREFILL_RANK, self._keys, num_bytes, limits, (grant.nonce, nonce)
        )
        forming.add_done_callback(self._keep)
        # cancelled, it goes on in its thread, is kept, and closed with the rest
        group = await asyncio.shield(asyncio.wrap_future(forming))
        if isinstance(group.slots, memoryview):
            self._slots = group.slots
        else:
            self._slots = DeviceSpan(self._copies, group.slots, 0, num_bytes, self._end)

    def place(self, offset: int) -> Place:
        return Place(self.staging_id, next(self._numbers))

    def publish(self, place: Place, offset: int, num_bytes: int) -> None:
        """Announce the payload and send it, after those that were announced before."""
        assert self._group is not None
        payload = pb.GroupPayload(number=place.offset, offset=offset, num_bytes=num_bytes)
        self._line.post(pb.GroupMessage(payload=payload))
        self._thread.post(self._send, offset, num_bytes).add_done_callback(self._sent)

    def watch(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        if self._is_ended:
            self._loop.call_soon(on_end)

    def close(self) -> None:
        """End the stream, which ends the group at decode; this end is destroyed after the call under way."""
        self._on_end = None
        self._is_ended = True
        self._keys.end()
        self._slots = None
        self._thread.post(self._destroy)
        self._thread.close()
        self._copies.close()
        self._line.close()
        if self._reading is not None:
            self._reading.cancel()
        self._closing = self._loop.create_task(self._stream.close())

    def _keep(self, forming: Future[PairGroup]) -> None:
        """On the thread, before anything else happens there."""
        if not forming.cancelled() and forming.exception() is None:
            self._group = forming.result()

    def _destroy(self) -> None:
        if self._group is not None:
            self._group.close()

    def _send(self, offset: int, num_bytes: int) -> None:
        if self._group is None or self._is_ended:
            raise OSError("the group has ended")  # each call that waits for nothing would take its full time
        self._group.send(offset, num_bytes)

    def _sent(self, sending: Future[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            if not self._is_ended:
                _log.warning("a payload was not sent through group %x: %r", self.staging_id, error)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._keys.end()
            if self._on_end is not None:
                self._on_end()

    async def _read(self) -> None:
        try:
            await hear_keys(self._messages, self._keys)
        except (ServingError, NotAttached) as error:
            _log.info("the stream of group %x broke: %s", self.staging_id, error)
        self._end()


async def hear_keys(messages: AsyncIterator[bytes], keys: KeyExchange) -> None:
    """Until the messages end. Raises NotAttached for one that is no key."""
    async for data in messages:
        message = decode_message(data)
        if message.WhichOneof("kind") != "key":
            raise NotAttached(Fallback.BROKEN, "a message of another protocol")
        keys.hear(message.key.key, message.key.value)


def form_proven(
    groups: Groups,
    rank: int,
    keys: KeyExchange,
    num_bytes: int,
    limits: GroupLimits,
    nonces: tuple[bytes, bytes],
) -> PairGroup:
    """A group whose other end has shown that it was told the second nonce, and was shown the first. Blocks;
    raises OSError or RuntimeError.
    """
    mine, expected = nonces
    group = groups.form(rank, keys, num_bytes, limits.attach_s, limits.op_s)
    try:
        if not secrets.compare_digest(group.swap(mine), expected):
            raise OSError("who is at the other end of the group was not told so by this one")
    except BaseException:
        group.close()
        raise
    return group
