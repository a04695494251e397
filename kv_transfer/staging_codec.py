"""An offer's reply ↔ values: which blocks decode holds, and where it offers shared memory. Pure functions."""

from __future__ import annotations

from kv_transfer.transport import OfferedStaging, StagingAddress
from protos import kv_transfer_pb2 as pb


def offer_reply(held: tuple[int, ...], address: StagingAddress | None) -> pb.OfferReply:
    reply = pb.OfferReply(held=held)
    if address is not None:
        reply.staging.host_id = address.host_id
        reply.staging.socket_name = address.socket_name
        reply.staging.token = address.token
    return reply


def offered_staging(reply: pb.OfferReply) -> OfferedStaging:
    return OfferedStaging(_address(reply.staging) if reply.HasField("staging") else None)


def _address(found: pb.StagingAddress) -> StagingAddress:
    return StagingAddress(found.host_id, found.socket_name, found.token)
