"""Frames whose payload lies on a device: what decode takes of them, and of the same blocks sent again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import TransferCorrupt
from kv_transfer.codec import Frame, decode_frame, encode_device_frame, encode_frame, payload_checksum
from kv_transfer.incoming import IncomingTicket
from kv_transfer.transport import CommitClaim, Fence, Place
from tests.unit.kv_transfer.doubles import LAYOUT, make_ticket

TICKET = make_ticket(2 * LAYOUT.block_size)
FENCE = Fence.of(TICKET)
SIZE = 2 * LAYOUT.block_bytes
PLACE = Place(staging_id=2**64 - 3, offset=4096)


def on_device(digest: int, num_bytes: int = SIZE) -> Frame:
    return decode_frame(encode_device_frame(FENCE, 0, 2, num_bytes, digest, PLACE))


def in_frame() -> Frame:
    return decode_frame(encode_frame(FENCE, 0, 2, bytes(SIZE))[0])


def offered() -> IncomingTicket:
    entry = IncomingTicket(TICKET, 5.0)
    entry.hold(())
    return entry


def test_a_frame_on_a_device_comes_back_as_it_was_made() -> None:
    frame = on_device(77)
    assert (frame.fence, frame.place, frame.checksum, frame.num_bytes) == (FENCE, PLACE, 77, SIZE)
    assert frame.is_on_device
    assert not in_frame().is_on_device


@pytest.mark.parametrize("position", range(96))
def test_no_flipped_bit_of_it_goes_unseen(position: int) -> None:
    damaged = bytearray(encode_device_frame(FENCE, 0, 2, SIZE, 77, PLACE))
    damaged[position] ^= 4
    with pytest.raises(TransferCorrupt):
        decode_frame(bytes(damaged))


def test_its_length_must_be_that_of_its_blocks() -> None:
    with pytest.raises(TransferCorrupt):
        offered().accept(on_device(77, SIZE - 8))


@pytest.mark.parametrize("is_device_first", [True, False])
def test_the_same_blocks_by_another_way_are_no_other_content_and_the_last_checksum_counts(
    is_device_first: bool,
) -> None:
    frames = [on_device(77), in_frame()]
    first, second = frames if is_device_first else reversed(frames)
    entry = offered()
    assert entry.accept(first)
    assert entry.note_written(0) == SIZE
    assert not entry.accept(second), "written blocks are not written again"
    last = payload_checksum(TICKET.ticket_id, bytes(SIZE)) if is_device_first else 77
    assert entry.check_commit(CommitClaim(TICKET.num_tokens, 2, last)).num_written_blocks == 2
    with pytest.raises(TransferCorrupt):
        entry.check_commit(CommitClaim(TICKET.num_tokens, 2, last ^ 1))


def test_other_content_by_the_same_way_is_refused() -> None:
    entry = offered()
    entry.accept(on_device(77))
    with pytest.raises(TransferCorrupt, match="other content"):
        entry.accept(replace(on_device(78)))
