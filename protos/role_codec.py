"""Orders to change a role, and what became of them ↔ protobuf.

Malformed input raises InvalidRequest with `details["param"]`. Pure functions; usable from any thread.
"""

from __future__ import annotations

import math

from core.ids import Role, WorkerRef
from core.role_change import RoleCause, RoleChange, RoleOrder
from protos import inference_pb2 as pb
from protos.value_codec import decode_worker_ref, encode_worker_ref, malformed


def role_request(order: RoleOrder) -> pb.RoleRequest:
    return pb.RoleRequest(receiver_epoch=order.worker.epoch, role=order.role.value, cause=order.cause.value)


def role_order(message: pb.RoleRequest, own: WorkerRef) -> RoleOrder:
    """What `own` is told to do."""
    try:
        role = Role(message.role)
    except ValueError:
        raise malformed("role", f"is {message.role[:40]!r}") from None
    try:
        cause = RoleCause(message.cause)
    except ValueError:
        raise malformed("cause", f"is {message.cause[:40]!r}") from None
    return RoleOrder(own, role, cause)


def role_reply(change: RoleChange) -> pb.RoleReply:
    return pb.RoleReply(ref=encode_worker_ref(change.ref), drain_s=change.drain_s, start_s=change.start_s)


def role_change(message: pb.RoleReply) -> RoleChange:
    for name in ("drain_s", "start_s"):
        if not 0.0 <= getattr(message, name) < math.inf:
            raise malformed(f"role_reply.{name}", "is no time")
    return RoleChange(decode_worker_ref(message.ref), message.drain_s, message.start_s)
