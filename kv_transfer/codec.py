"""Frames and acknowledgements of a push, as `protos/kv_transfer.proto` draws them: header + raw payload, or
header + the place of the payload in staging memory.

A payload that travels in its frame is copied once here, when the two are joined; decoding copies nothing.
Pure functions; usable from any thread.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from core.errors import ServingError, TransferCorrupt
from core.ids import Epoch, TicketId
from kv_transfer.transport import Fence, Place
from protos.error_codec import decode_error, encode_error
from protos.transfer_codec import ticket_id_bytes

MAGIC = b"BKV1"

# magic, header length, flags, receiver epoch, sender epoch, ticket id, first index, blocks, payload bytes,
# checksum
_FIELDS = struct.Struct("<4sHHQQ16sIIQQ")
_CHECK = struct.Struct("<Q")
# staging id, offset; the bytes that follow them are their xxh3-64, seeded by the header's
_PLACE = struct.Struct("<QQ")
_ACK = struct.Struct("<IIII")
HEADER_BYTES = _FIELDS.size + _CHECK.size
assert HEADER_BYTES == 72

_WRITTEN, _REFUSED = 0, 1
_IS_STAGED, _IS_ON_DEVICE = 1, 2
_KNOWN_FLAGS = (0, _IS_STAGED, _IS_STAGED | _IS_ON_DEVICE)


@dataclass(frozen=True, slots=True)
class Frame:
    """Consecutive blocks of a ticket. The header is verified, the payload not before `verify` was called.

    The payload of a frame with a `place` lies there, `payload` is empty, and only what is copied from there
    can be verified: by `check`, or on the device by comparing the digest of the copy with `checksum`.
    """

    fence: Fence
    first_index: int
    num_blocks: int
    num_bytes: int
    checksum: int
    payload: memoryview
    place: Place | None = None
    is_on_device: bool = False

    def verify(self, block_bytes: int) -> None:
        """Raises TransferCorrupt unless length and checksum of the payload are right; for a payload that lies
        elsewhere, unless its length is.
        """
        if self.num_bytes != self.num_blocks * block_bytes:
            raise TransferCorrupt(
                f"{self.num_bytes} payload bytes are not {self.num_blocks} blocks of {block_bytes}",
                ticket_id=self.fence.ticket_id,
                first_index=self.first_index,
            )
        if self.place is None and payload_checksum(self.fence.ticket_id, self.payload) != self.checksum:
            raise TransferCorrupt(
                "a payload does not match its checksum",
                ticket_id=self.fence.ticket_id,
                first_index=self.first_index,
                num_blocks=self.num_blocks,
            )

    def check(self) -> PayloadCheck:
        """A new check, for bytes that are copied from the frame's place."""
        return PayloadCheck(self.fence.ticket_id, self.checksum, self.num_bytes)


class PayloadCheck:
    """A WriteCheck: sums up the pieces of a payload that it is shown."""

    def __init__(self, ticket_id: TicketId, checksum: int, num_bytes: int) -> None:
        self._sum = xxhash.xxh3_64(seed=payload_seed(ticket_id))
        self._checksum = checksum
        self._num_left = num_bytes

    def observe(self, piece: memoryview) -> None:
        self._sum.update(piece)
        self._num_left -= piece.nbytes

    @property
    def is_right(self) -> bool:
        return bool(self._num_left == 0 and self._sum.intdigest() == self._checksum)


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to one frame: written, or the error that ended the stream."""

    first_index: int
    num_blocks: int
    error: ServingError | None = None


def payload_checksum(ticket_id: TicketId, payload: memoryview | bytes) -> int:
    """xxh3-64 of the payload, seeded by the ticket, so that another ticket's bytes never pass."""
    return xxhash.xxh3_64_intdigest(payload, payload_seed(ticket_id))


def encode_frame(
    fence: Fence, first_index: int, num_blocks: int, payload: memoryview | bytes
) -> tuple[bytes, int]:
    """The frame, and the payload's checksum."""
    checksum = payload_checksum(fence.ticket_id, payload)
    num_bytes = len(payload) if isinstance(payload, bytes) else payload.nbytes
    header = _header(fence, 0, first_index, num_blocks, num_bytes, checksum)
    return b"".join((header, payload)), checksum


def encode_staged_frame(
    fence: Fence, first_index: int, num_blocks: int, payload: memoryview, place: Place
) -> tuple[bytes, int]:
    """A frame for a payload that lies at `place`, and the payload's checksum."""
    checksum = payload_checksum(fence.ticket_id, payload)
    header = _header(fence, _IS_STAGED, first_index, num_blocks, payload.nbytes, checksum)
    return header + _encode_place(header, place), checksum


def encode_device_frame(
    fence: Fence, first_index: int, num_blocks: int, num_bytes: int, digest: int, place: Place
) -> bytes:
    """A frame for a payload with this digest that lies at `place` on a device."""
    header = _header(fence, _IS_STAGED | _IS_ON_DEVICE, first_index, num_blocks, num_bytes, digest)
    return header + _encode_place(header, place)


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
    if magic != MAGIC or header_bytes != HEADER_BYTES or flags not in _KNOWN_FLAGS:
        raise TransferCorrupt(
            "a frame of an unknown format", magic=magic.hex(), header_bytes=header_bytes, flags=flags
        )
    fence = Fence(Epoch(receiver), Epoch(sender), TicketId(ticket.hex()))
    payload = view[HEADER_BYTES:]
    if flags & _IS_STAGED:
        place, is_on_device = _decode_place(view[:HEADER_BYTES], payload, fence), bool(flags & _IS_ON_DEVICE)
        return Frame(fence, first, blocks, payload_bytes, checksum, memoryview(b""), place, is_on_device)
    if payload_bytes != len(payload):
        raise TransferCorrupt(
            f"a frame announces {payload_bytes} payload bytes and carries {len(payload)}",
            ticket_id=fence.ticket_id,
        )
    return Frame(fence, first, blocks, payload_bytes, checksum, payload)


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


def payload_seed(ticket_id: TicketId) -> int:
    """64 bits with which the checksums of a ticket's payloads begin."""
    return int.from_bytes(ticket_id_bytes(ticket_id)[:8], "little")


def _header(
    fence: Fence, flags: int, first_index: int, num_blocks: int, num_bytes: int, checksum: int
) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        HEADER_BYTES,
        flags,
        fence.receiver_epoch,
        fence.sender_epoch,
        ticket_id_bytes(fence.ticket_id),
        first_index,
        num_blocks,
        num_bytes,
        checksum,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def _encode_place(header: bytes, place: Place) -> bytes:
    fields = _PLACE.pack(place.staging_id, place.offset)
    return fields + _CHECK.pack(_place_checksum(header, fields))


def _decode_place(header: memoryview, data: memoryview, fence: Fence) -> Place:
    fields = data[: _PLACE.size]
    is_whole = len(data) == _PLACE.size + _CHECK.size
    if not is_whole or _CHECK.unpack_from(data, _PLACE.size)[0] != _place_checksum(header, fields):
        raise TransferCorrupt(
            "the place of a frame's payload does not match its checksum", ticket_id=fence.ticket_id
        )
    return Place(*_PLACE.unpack(fields))


def _place_checksum(header: bytes | memoryview, fields: bytes | memoryview) -> int:
    seed: int = _CHECK.unpack_from(header, _FIELDS.size)[0]
    return int(xxhash.xxh3_64_intdigest(fields, seed))
