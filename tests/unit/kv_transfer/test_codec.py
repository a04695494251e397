"""A frame is what the proto file draws, and no damaged one is ever taken for an intact one."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ReservationRefused, TransferCorrupt
from core.ids import Epoch, TicketId
from kv_transfer.codec import (
    HEADER_BYTES,
    Ack,
    decode_ack,
    decode_frame,
    encode_ack,
    encode_frame,
    encode_staged_frame,
)
from kv_transfer.transport import Fence, Place
from tests.unit.kv_transfer.doubles import quick

BLOCK_BYTES = 32
epochs = st.integers(0, 2**64 - 1).map(Epoch)
ticket_ids = st.binary(min_size=16, max_size=16).map(lambda raw: TicketId(raw.hex()))
fences = st.builds(Fence, epochs, epochs, ticket_ids)
payloads = st.integers(1, 5).flatmap(lambda n: st.binary(min_size=n * BLOCK_BYTES, max_size=n * BLOCK_BYTES))
FENCE = Fence(Epoch(1), Epoch(2), TicketId(bytes(range(16)).hex()))


@quick
@given(fences, st.integers(0, 2**32 - 1), payloads)
def test_a_frame_keeps_all_it_carries(fence: Fence, first_index: int, payload: bytes) -> None:
    num_blocks = len(payload) // BLOCK_BYTES
    data, checksum = encode_frame(fence, first_index, num_blocks, memoryview(payload))
    frame = decode_frame(data)
    frame.verify(BLOCK_BYTES)
    assert (frame.fence, frame.first_index, frame.num_blocks, frame.checksum, frame.payload) == (
        fence,
        first_index,
        num_blocks,
        checksum,
        payload,
    )


def test_a_frame_is_laid_out_as_the_proto_file_says() -> None:
    payload = bytes(range(64))
    data, _ = encode_frame(Fence(Epoch(0x1122), Epoch(0x3344), FENCE.ticket_id), 5, 2, payload)
    seed = int.from_bytes(bytes(range(8)), "little")
    assert data[:4] == b"BKV1"
    assert struct.unpack_from("<HHQQ", data, 4) == (72, 0, 0x1122, 0x3344)
    assert data[24:40] == bytes(range(16))
    assert struct.unpack_from("<IIQQ", data, 40) == (5, 2, 64, xxhash.xxh3_64_intdigest(payload, seed))
    assert struct.unpack_from("<Q", data, 64) == (xxhash.xxh3_64_intdigest(data[:64]),)
    assert data[72:] == payload


def test_decoding_copies_no_payload() -> None:
    data, _ = encode_frame(FENCE, 0, 2, bytes(64))
    assert decode_frame(data).payload.obj is data


@quick
@given(payloads, st.data())
def test_any_changed_byte_is_noticed(payload: bytes, draw: st.DataObject) -> None:
    data = bytearray(encode_frame(FENCE, 3, len(payload) // BLOCK_BYTES, payload)[0])
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(TransferCorrupt):
        decode_frame(bytes(data)).verify(BLOCK_BYTES)


@quick
@given(payloads, st.data())
def test_a_shortened_frame_is_noticed(payload: bytes, draw: st.DataObject) -> None:
    data = encode_frame(FENCE, 3, len(payload) // BLOCK_BYTES, payload)[0]
    with pytest.raises(TransferCorrupt):
        decode_frame(data[: draw.draw(st.integers(0, len(data) - 1))]).verify(BLOCK_BYTES)


@quick
@given(fences, st.integers(0, 2**32 - 1), payloads, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_staged_frame_names_the_place_of_its_payload_and_only_the_right_copy_passes_its_check(
    fence: Fence, first_index: int, payload: bytes, staging_id: int, offset: int
) -> None:
    num_blocks, place = len(payload) // BLOCK_BYTES, Place(staging_id, offset)
    data, checksum = encode_staged_frame(fence, first_index, num_blocks, memoryview(payload), place)
    frame = decode_frame(data)
    frame.verify(BLOCK_BYTES)
    assert (frame.fence, frame.first_index, frame.num_blocks) == (fence, first_index, num_blocks)
    assert (frame.num_bytes, frame.checksum, frame.place) == (len(payload), checksum, place)
    assert encode_frame(fence, first_index, num_blocks, payload)[1] == checksum, "the same bytes either way"
    for pieces, is_right in (
        ([payload[:7], payload[7:]], True),
        ([payload[:7]], False),
        ([], False),
        ([payload, payload[:1]], False),
        ([bytes([payload[0] ^ 1]), payload[1:]], False),
    ):
        check = frame.check()
        for piece in pieces:
            check.observe(memoryview(piece))
        assert check.is_right is is_right


def test_a_staged_frame_is_laid_out_as_the_proto_file_says() -> None:
    data, _ = encode_staged_frame(FENCE, 5, 2, memoryview(bytes(64)), Place(0x55, 0x66))
    assert len(data) == 96
    assert struct.unpack_from("<HH", data, 4) == (72, 1)
    assert struct.unpack_from("<QQ", data, 72) == (0x55, 0x66)
    seed = struct.unpack_from("<Q", data, 64)[0]
    assert struct.unpack_from("<Q", data, 88) == (xxhash.xxh3_64_intdigest(data[72:88], seed),)


@quick
@given(payloads, st.data())
def test_any_changed_byte_of_a_staged_frame_is_noticed(payload: bytes, draw: st.DataObject) -> None:
    num_blocks = len(payload) // BLOCK_BYTES
    data = bytearray(encode_staged_frame(FENCE, 3, num_blocks, memoryview(payload), Place(7, 4096))[0])
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(TransferCorrupt):
        decode_frame(bytes(data)).verify(BLOCK_BYTES)
    with pytest.raises(TransferCorrupt):
        decode_frame(bytes(data[:position])).verify(BLOCK_BYTES)


@quick
@given(st.binary(max_size=200))
def test_random_bytes_are_no_frame_and_no_acknowledgement_of_success(data: bytes) -> None:
    with pytest.raises(TransferCorrupt):
        decode_frame(data)


def test_a_payload_of_another_ticket_does_not_pass_as_this_tickets() -> None:
    payload = bytes(range(BLOCK_BYTES))
    other = Fence(FENCE.receiver_epoch, FENCE.sender_epoch, TicketId("ff" * 16))
    assert encode_frame(FENCE, 0, 1, payload)[1] != encode_frame(other, 0, 1, payload)[1]


def test_a_payload_of_another_block_size_is_refused() -> None:
    frame = decode_frame(encode_frame(FENCE, 0, 2, bytes(2 * BLOCK_BYTES))[0])
    with pytest.raises(TransferCorrupt):
        frame.verify(BLOCK_BYTES * 2)


def test_a_frame_of_a_later_format_is_refused() -> None:
    fields = struct.pack("<4sHHQQ16sIIQQ", b"BKV2", HEADER_BYTES, 0, 1, 2, bytes(16), 0, 0, 0, 0)
    data = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
    with pytest.raises(TransferCorrupt, match="unknown format"):
        decode_frame(data)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_an_acknowledgement_keeps_its_range(first_index: int, num_blocks: int) -> None:
    assert decode_ack(encode_ack(Ack(first_index, num_blocks))) == Ack(first_index, num_blocks)


def test_a_refusal_keeps_its_error() -> None:
    ack = decode_ack(encode_ack(Ack(4, 2, ReservationRefused("no room", num_free=3))))
    assert (ack.first_index, ack.num_blocks) == (4, 2)
    assert isinstance(ack.error, ReservationRefused)
    assert ack.error.details == {"num_free": 3}


@pytest.mark.parametrize("cut", [0, 15, 17])
def test_a_damaged_acknowledgement_is_no_acknowledgement(cut: int) -> None:
    data = encode_ack(Ack(4, 2, ReservationRefused("no room")))
    with pytest.raises(TransferCorrupt):
        decode_ack(data[:cut])
