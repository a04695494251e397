"""What the bridge needs of others, as Protocols, and the values that pass between its parts.

`BlockStore` is satisfied by the engine's pool, `ReservationPort` by decode's inbox, `Transport` by each way
to carry bytes (gRPC, loopback). Everything here is used on one asyncio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.handoff import HandoffTicket
from core.ids import Epoch, TicketId, WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.device_memory import DeviceCopy
from kv_transfer.device_thread import DeviceSpan


@dataclass(frozen=True, slots=True)
class Fence:
    """Whom a message is for, who sends it, for which ticket: any of them being wrong makes it harmless."""

    receiver_epoch: Epoch
    sender_epoch: Epoch
    ticket_id: TicketId

    @staticmethod
    def of(ticket: HandoffTicket) -> Fence:
        """The fence of everything that prefill sends for `ticket`."""
        return Fence(ticket.decode.epoch, ticket.prefill.epoch, ticket.ticket_id)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker, in these incarnations, and the blocks that they exchange."""

    prefill: WorkerRef
    decode: WorkerRef
    layout: KVLayout

    @staticmethod
    def of(ticket: HandoffTicket) -> Pair:
        return Pair(ticket.prefill, ticket.decode, ticket.layout)


@dataclass(frozen=True, slots=True)
class CommitClaim:
    """What prefill says it has pushed; decode compares it with what it wrote.

    `checksum` is the XOR of the payload checksums of all distinct frames.
    """

    num_tokens: int
    num_pushed_blocks: int
    checksum: int


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """What decode wrote for the ticket, counted after its checks."""

    num_written_blocks: int
    num_written_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies that does not travel in its frame: which staging memory, which byte of it; of a
    group, the payload's number.
    """

    staging_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Room:
    """Staging memory for one payload: it is read into `memory`, and its frame names `place`."""

    memory: memoryview | DeviceSpan
    place: Place


@dataclass(frozen=True, slots=True)
class Carriage:
    """How a transport carries payloads at present: by which way (a label of metrics), how much of them in one
    frame (None: as configured), if not the way that was asked for, why not (a word for metrics), and whether
    they stay on a device.
    """

    way: str
    frame_bytes: int | None = None
    fallback: str = ""
    is_on_device: bool = False


class BlockStore(Protocol):
    """A worker's pool of KV blocks, addressed by the worker's own block ids."""

    @property
    def layout(self) -> KVLayout: ...

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """A contiguous copy, block after block, each `layout.block_bytes` bytes of `layout.block_shape`."""
        ...

    def read_blocks_into(self, block_ids: Sequence[int], target: memoryview) -> None:
        """The same, written to `target` in one copy."""
        ...

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        """The inverse; `observe` is called with what is written, in the payload's order: with just that, even
        if `payload` changes meanwhile.
        """
        ...


class WriteCheck(Protocol):
    """Tells of what is written to blocks whether it is what was sent."""

    def observe(self, piece: memoryview) -> None:
        """The next bytes of the payload, as they are written."""
        ...

    @property
    def is_right(self) -> bool:
        """Whether all that was observed is what was sent."""
        ...


Payload = memoryview | DeviceCopy
"""What is to be written to blocks: bytes of the host, or verified ones on the device."""


class ReservationPort(Protocol):
    """What the receiver needs of decode. Called on the IO loop."""

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        """Reserve all blocks and room to grow, atomically; returns the indexes that are already here.

        Those are pinned for the ticket. Raises ReservationRefused, WorkerDraining, or TicketExpired for a
        ticket that was aborted.
        """
        ...

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        """Copy the payload into the reserved blocks; TicketExpired when the reservation is gone.

        Without `check` the payload was verified. With it the payload lies in memory that its writer can still
        change: it is read once, and `check` decides over what was written; TransferCorrupt, and the ticket is
        over, if that is wrong. Blocks that were written before are not written again, and not read either.
        """
        ...

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        """All blocks are here and verified: they may be attended to and cached. Raises TicketExpired."""
        ...

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        """Give the reservation back; refuse a late offer of an unknown ticket for `time_left_s`."""
        ...

    async def keepalive(self, ticket_id: TicketId) -> None:
        """Prefill is alive but has nothing to push. Raises TicketExpired."""
        ...


CUDA_IPC = "cuda_ipc"
"""The label of metrics for payloads that came through memory of a device."""
SHM = "shm"
"""The label of metrics for payloads that came through shared memory, whatever carried their frames."""
DISTRIBUTED = "distributed"
"""The label of metrics for payloads that came through a process group of the pair."""


@dataclass(frozen=True, slots=True)
class StagingAddress:
    """Where a process of this host may ask decode for staging memory; `token` shows that it was told.

    `device_id` names the device on which the memory is; empty for memory of the host.
    """

    host_id: str
    socket_name: str
    token: bytes
    device_id: str = ""


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Decode forms process groups with this backend."""

    backend: str


@dataclass(frozen=True, slots=True)
class OfferedStaging:
    """Where decode offers which kind of staging memory."""

    shm: StagingAddress | None = None
    device: StagingAddress | None = None
    group: GroupAddress | None = None


class StagingArea(Protocol):
    """Decode's staging memory of one kind, for the receiver."""

    @property
    def label(self) -> str:
        """Of metrics."""
        ...

    @property
    def is_on_device(self) -> bool: ...

    def offer(self, offered: OfferedStaging) -> OfferedStaging:
        """`offered`, and where this memory is."""
        ...

    async def find(self, place: Place, num_bytes: int, sender_epoch: Epoch) -> memoryview | DeviceSpan | None:
        """The bytes there, which their writer may still change, when they have come; None if that incarnation
        of prefill has no such memory (any more). Raises TransferCorrupt for a place outside of it.
        """
        ...

    async def close(self) -> None: ...


class PushStream(Protocol):
    """One ordered stream of frames to decode and of acknowledgements back."""

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        """Memory for the payload of the next frame, waiting until there is some; None when payloads travel in
        their frames. The frame that is sent next is the one that names it.
        """
        ...

    async def send(self, frame: bytes) -> None:
        """Hand one frame to the connection, waiting while it is full. Raises WorkerLost when it broke."""
        ...

    def acks(self) -> AsyncIterator[bytes]:
        """Acknowledgements in the order of the frames; raises WorkerLost when the stream breaks."""
        ...

    async def close(self) -> None:
        """End the stream, whatever its state; frames without acknowledgement may or may not have arrived."""
        ...


class Transport(Protocol):
    """Prefill's side of the bridge to one decode worker. WorkerLost means that the connection broke."""

    @property
    def name(self) -> str:
        """The label of metrics: `grpc`, `loopback`, `shm`, `cuda_ipc`, `distributed`."""
        ...

    @property
    def carriage(self) -> Carriage:
        """How payloads are carried, as far as it is known; it is when an offer was answered."""
        ...

    async def meet(self, pair: Pair) -> None:
        """Connect and attach what the pair's payloads will go through, before any ticket asks for it. Raises
        what an offer would.
        """
        ...

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]: ...

    async def open_push(self) -> PushStream: ...

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt: ...

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None: ...

    async def keepalive(self, fence: Fence) -> None: ...

    async def close(self) -> None: ...


Connect = Callable[[WorkerRef], Transport]
"""Makes the transport to a decode worker; it must not block, connecting happens at the first call."""
