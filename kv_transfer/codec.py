"""Frames and acknowledgements of a push, as `protos/kv_transfer.proto` draws them: header + raw payload.

A payload is copied once here, when header and payload are joined; decoding copies nothing. Pure functions;
usable from any thread.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from core.errors import ServingError, TransferCorrupt
from core.ids import Epoch, TicketId
from kv_transfer.transport import Fence
from protos.error_codec import decode_error, encode_error
from protos.transfer_codec import ticket_id_bytes

MAGIC = b"BKV1"

# magic, header length, flags, receiver epoch, sender epoch, ticket id, first index, blocks, payload bytes,
# checksum
_FIELDS = struct.Struct("<4sHHQQ16sIIQQ")
_CHECK = struct.Struct("<Q")
_ACK = struct.Struct("<IIII")
HEADER_BYTES = _FIELDS.size + _CHECK.size
assert HEADER_BYTES == 72

_WRITTEN, _REFUSED = 0, 1


@dataclass(frozen=True, slots=True)
class Frame:
    """Consecutive blocks of a ticket. The header is verified, the payload not before `verify` was called."""

    fence: Fence
    first_index: int
    num_blocks: int
    checksum: int
    payload: memoryview

    def verify(self, block_bytes: int) -> None:
        """Raises TransferCorrupt unless length and checksum of the payload are right."""
        if len(self.payload) != self.num_blocks * block_bytes:
            raise TransferCorrupt(
                f"{len(self.payload)} payload bytes are not {self.num_blocks} blocks of {block_bytes}",
                ticket_id=self.fence.ticket_id,
                first_index=self.first_index,
            )
        if payload_checksum(self.fence.ticket_id, self.payload) != self.checksum:
            raise TransferCorrupt(
                "a payload does not match its checksum",
                ticket_id=self.fence.ticket_id,
                first_index=self.first_index,
                num_blocks=self.num_blocks,
            )


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to one frame: written, or the error that ended the stream."""

    first_index: int
    num_blocks: int
    error: ServingError | None = None


def payload_checksum(ticket_id: TicketId, payload: memoryview | bytes) -> int:
    """xxh3-64 of the payload, seeded by the ticket, so that another ticket's bytes never pass."""
    seed = int.from_bytes(ticket_id_bytes(ticket_id)[:8], "little")
    return xxhash.xxh3_64_intdigest(payload, seed)


def encode_frame(
    fence: Fence, first_index: int, num_blocks: int, payload: memoryview | bytes
) -> tuple[bytes, int]:
    """The frame, and the payload's checksum."""
    checksum = payload_checksum(fence.ticket_id, payload)
    fields = _FIELDS.pack(
        MAGIC,
        HEADER_BYTES,
        0,
        fence.receiver_epoch,
        fence.sender_epoch,
        ticket_id_bytes(fence.ticket_id),
        first_index,
        num_blocks,
        len(payload) if isinstance(payload, bytes) else payload.nbytes,
        checksum,
    )
    return b"".join((fields, _CHECK.pack(xxhash.xxh3_64_intdigest(fields)), payload)), checksum


def decode_frame(data: bytes | memoryview) -> Frame:
    """A view of `data`. Raises TransferCorrupt when its header is damaged or its length is wrong."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise TransferCorrupt(f"a frame of {len(view)} bytes has no room for its header")
    fields = view[: _FIELDS.size]
    if _CHECK.unpack_from(view, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
        raise TransferCorrupt("a frame's header does not match its checksum")
    magic, header_bytes, flags, receiver, sender, ticket, first, blocks, payload_bytes, checksum = (
        _FIELDS.unpack(fields)
    )
    if magic != MAGIC or header_bytes != HEADER_BYTES or flags != 0:
        raise TransferCorrupt(
            "a frame of an unknown format", magic=magic.hex(), header_bytes=header_bytes, flags=flags
        )
    fence = Fence(Epoch(receiver), Epoch(sender), TicketId(ticket.hex()))
    payload = view[HEADER_BYTES:]
    if payload_bytes != len(payload):
        raise TransferCorrupt(
            f"a frame announces {payload_bytes} payload bytes and carries {len(payload)}",
            ticket_id=fence.ticket_id,
        )
    return Frame(fence, first, blocks, checksum, payload)


def encode_ack(ack: Ack) -> bytes:
    if ack.error is None:
        return _ACK.pack(ack.first_index, ack.num_blocks, _WRITTEN, 0)
    detail = encode_error(ack.error)
    return _ACK.pack(ack.first_index, ack.num_blocks, _REFUSED, len(detail)) + detail


def decode_ack(data: bytes) -> Ack:
    """Raises TransferCorrupt when `data` is no acknowledgement."""
    if len(data) < _ACK.size:
        raise TransferCorrupt(f"an acknowledgement of {len(data)} bytes is too short")
    first_index, num_blocks, status, detail_bytes = _ACK.unpack_from(data)
    if len(data) != _ACK.size + detail_bytes:
        raise TransferCorrupt("an acknowledgement's length is wrong")
    if status == _WRITTEN:
        return Ack(first_index, num_blocks)
    return Ack(first_index, num_blocks, decode_error(data[_ACK.size :]))
