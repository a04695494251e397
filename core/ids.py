"""Names of things: workers, requests, tickets, tenants.

Owns how identifiers are made and what a worker's name consists of. Holds no state; usable from any thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
TicketId = NewType("TicketId", str)
TenantId = NewType("TenantId", str)
Epoch = NewType("Epoch", int)

DEFAULT_TENANT = TenantId("default")
NO_EPOCH = Epoch(0)
"""Of no process."""


class Role(StrEnum):
    """The phase a worker runs at present."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One incarnation of a worker: who, doing what, since when, and where it listens.

    `epoch` is drawn anew by each process, so a message meant for a dead process is refused by the process
    that inherited its port. `address` is `host:port` of its gRPC server, or `loopback:<worker_id>` inside
    one process.
    """

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    address: str


def new_epoch() -> Epoch:
    """A random, non-zero 63-bit incarnation number."""
    return Epoch(secrets.randbits(63) | 1)


def new_ticket_id() -> TicketId:
    """A random 128-bit ticket name in hex; never derived from anything a client sent."""
    return TicketId(secrets.token_hex(16))


def new_request_id(prefix: str) -> RequestId:
    """A random request name such as `cmpl-…`; it is ours, a client's X-Request-Id is only an attribute."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")
