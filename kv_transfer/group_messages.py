"""Messages of a pair's process group, and the line on which one end sends them.

Owns their order on the way out. Lives on the IO loop, except `GroupLine.tell_key`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from kv_transfer.shm_handshake import Fallback, NotAttached
from protos import kv_transfer_pb2 as pb

_log = logging.getLogger(__name__)

NONCE_BYTES = 16


def refusal(reason: Fallback) -> bytes:
    return pb.GroupMessage(refusal=reason).SerializeToString()


def decode_message(data: bytes) -> pb.GroupMessage:
    """Raises NotAttached for what is none."""
    try:
        return pb.GroupMessage.FromString(data)
    except DecodeError as error:
        raise NotAttached(Fallback.BROKEN, "a message that cannot be read") from error


async def next_message(messages: AsyncIterator[bytes]) -> pb.GroupMessage:
    """Raises NotAttached if there is none, or a refusal."""
    data = await anext(messages, None)
    if data is None:
        raise NotAttached(Fallback.REFUSED, "the other end has ended the stream")
    message = decode_message(data)
    if message.WhichOneof("kind") == "refusal":
        reasons = {reason.value: reason for reason in Fallback}
        raise NotAttached(reasons.get(message.refusal, Fallback.REFUSED), "decode refused")
    return message


class GroupLine:
    """Sends messages in the order in which they were posted, however long `send` takes."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[pb.GroupMessage | None] = asyncio.Queue()
        self._sending = self._loop.create_task(self._drain(), name="group messages")

    def post(self, message: pb.GroupMessage) -> None:
        self._queue.put_nowait(message)

    def tell_key(self, key: str, value: bytes) -> None:
        """From any thread, while the loop lives."""
        message = pb.GroupMessage(key=pb.GroupKey(key=key, value=value))
        self._loop.call_soon_threadsafe(self.post, message)

    def close(self) -> None:
        self._sending.cancel()

    async def finish(self) -> None:
        """Return when what was posted is sent. A gRPC call must not end while a write is under way: its end
        would be refused, and the other side would never hear of it.
        """
        self._queue.put_nowait(None)
        await self._sending

    async def _drain(self) -> None:
        while (message := await self._queue.get()) is not None:
            try:
                await self._send(message.SerializeToString())
            except Exception as error:  # noqa: BLE001 - logged; the stream's reader hears of its end
                _log.info("a message of a process group was not sent: %s", error)
                return
