"""The bridge's messages ↔ values: HandoffTicket, KVLayout, checks of what decode is told of a ticket.

Malformed input raises TransferCorrupt. Frames and acknowledgements of a push are not protobuf: they are in
`kv_transfer.codec`. Pure functions; usable from any thread.
"""

from __future__ import annotations

import math

from core.errors import RequestError, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, TicketId, WorkerRef
from core.kv_layout import DTYPE_BYTES, KVLayout
from protos import inference_pb2
from protos import kv_transfer_pb2 as pb
from protos.value_codec import decode_hashes, decode_worker_ref, encode_hashes, encode_worker_ref

TICKET_ID_BYTES = 16
VERSION = 1
"""Of the bridge's messages and frames. Both ends must speak the same."""


def ticket_id_bytes(ticket_id: str) -> bytes:
    """The 16 raw bytes of a ticket's hex name; TransferCorrupt if it is not one."""
    try:
        raw = bytes.fromhex(ticket_id)
    except ValueError:
        raw = b""
    if len(raw) != TICKET_ID_BYTES or raw.hex() != ticket_id:
        raise TransferCorrupt(f"a ticket's name is {2 * TICKET_ID_BYTES} hex digits", param="ticket_id")
    return raw


def encode_layout(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(
        model=layout.model,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        scales=layout.scales,
    )


def decode_layout(message: pb.KVLayout) -> KVLayout:
    if min(message.num_layers, message.num_kv_heads, message.head_dim, message.block_size) < 1:
        raise TransferCorrupt("a layout's dimensions must be at least 1", param="layout")
    if message.dtype not in DTYPE_BYTES:
        raise TransferCorrupt(f"unknown KV dtype {message.dtype[:40]!r}", param="layout.dtype")
    return KVLayout(
        model=message.model,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
        scales=message.scales,
    )


def encode_ticket(ticket: HandoffTicket) -> pb.Ticket:
    return pb.Ticket(
        ticket_id=ticket.ticket_id,
        request_id=ticket.request_id,
        prefill=encode_worker_ref(ticket.prefill),
        decode=encode_worker_ref(ticket.decode),
        layout=encode_layout(ticket.layout),
        num_tokens=ticket.num_tokens,
        block_hashes=encode_hashes(ticket.block_hashes),
        num_samples=ticket.num_samples,
        num_growth_tokens=ticket.num_growth_tokens,
        is_prefix_cache_read=ticket.is_prefix_cache_read,
    )


def decode_ticket(message: pb.Ticket) -> HandoffTicket:
    """The ticket; its counts agree: one hash for each full block, at least one token and one sample."""
    for field in ("prefill", "decode", "layout"):
        if not message.HasField(field):
            raise TransferCorrupt(f"the ticket lacks its {field}", param=f"ticket.{field}")
    ticket_id_bytes(message.ticket_id)
    layout = decode_layout(message.layout)
    if message.num_tokens < 1 or message.num_samples < 1 or message.num_growth_tokens < 0:
        raise TransferCorrupt("the ticket's counts are out of range", param="ticket.num_tokens")
    try:
        hashes = decode_hashes(message.block_hashes, "ticket.block_hashes")
    except RequestError as error:
        raise TransferCorrupt(error.message, param="ticket.block_hashes") from error
    if len(hashes) != message.num_tokens // layout.block_size:
        raise TransferCorrupt(
            f"{len(hashes)} hashes do not name the full blocks of {message.num_tokens} tokens",
            param="ticket.block_hashes",
        )
    return HandoffTicket(
        ticket_id=TicketId(message.ticket_id),
        request_id=RequestId(message.request_id),
        prefill=_worker_ref(message.prefill, "ticket.prefill"),
        decode=_worker_ref(message.decode, "ticket.decode"),
        layout=layout,
        num_tokens=message.num_tokens,
        block_hashes=hashes,
        num_samples=message.num_samples,
        num_growth_tokens=message.num_growth_tokens,
        is_prefix_cache_read=message.is_prefix_cache_read,
    )


def meet_request(prefill: WorkerRef, layout: KVLayout, receiver_epoch: Epoch) -> pb.MeetRequest:
    return pb.MeetRequest(
        receiver_epoch=receiver_epoch,
        prefill=encode_worker_ref(prefill),
        layout=encode_layout(layout),
        version=VERSION,
    )


def met_prefill(message: pb.MeetRequest) -> tuple[WorkerRef, KVLayout]:
    """Who wants to exchange blocks, and which."""
    return _worker_ref(message.prefill, "prefill"), decode_layout(message.layout)


def offer_request(ticket: HandoffTicket, time_left_s: float, receiver_epoch: Epoch) -> pb.OfferRequest:
    return pb.OfferRequest(
        receiver_epoch=receiver_epoch,
        ticket=encode_ticket(ticket),
        time_left_s=time_left_s,
        version=VERSION,
    )


def offered_ticket(message: pb.OfferRequest) -> HandoffTicket:
    if not message.HasField("ticket"):
        raise TransferCorrupt("the offer lacks its ticket", param="ticket")
    return decode_ticket(message.ticket)


def time_left(message: pb.OfferRequest | pb.AbortRequest) -> float:
    """Seconds; a NaN would make a deadline that never passes."""
    if not math.isfinite(message.time_left_s) or message.time_left_s < 0:
        raise TransferCorrupt(
            "time left must be a finite number of seconds, not negative", param="time_left_s"
        )
    return message.time_left_s


def _worker_ref(message: inference_pb2.WorkerRef, param: str) -> WorkerRef:
    try:
        return decode_worker_ref(message, param)
    except RequestError as error:
        raise TransferCorrupt(error.message, param=param) from error
