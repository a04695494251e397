"""What the bridge needs of process groups, as Protocols. Satisfied by the engine for torch.distributed.

A group has two members: prefill (rank 0) and decode (rank 1). Its calls block, so each group has a thread of
its own at each end; they end with OSError or RuntimeError when the other end is gone, or when it takes longer
than was agreed. A group is no part of any world: it is formed and closed without a third process hearing of
it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from kv_transfer.device_memory import DeviceRegion
from kv_transfer.key_exchange import KeyExchange
from kv_transfer.transport import StagingArea

PREFILL_RANK, DECODE_RANK = 0, 1


class PairGroup(Protocol):
    """One end of a group, and the memory through which it exchanges payloads, which is nobody else's."""

    @property
    def slots(self) -> memoryview | DeviceRegion: ...

    def swap(self, mine: bytes) -> bytes:
        """Send `mine` to the other end; returns what it has sent, of the same length."""
        ...

    def send(self, offset: int, num_bytes: int) -> None:
        """When it returns, the other end has taken it, or its system holds it on the way."""
        ...

    def receive(self, offset: int, num_bytes: int) -> None:
        """What the other end sends next lies at `offset` when it returns, and is not written any more."""
        ...

    def close(self) -> None:
        """Destroy the group: nothing writes to its memory any more, which is freed. No call is under way."""
        ...


class Groups(Protocol):
    """Makes groups on this worker's device."""

    @property
    def backend(self) -> str:
        """Both ends must have the same."""
        ...

    def form(self, rank: int, keys: KeyExchange, num_bytes: int, attach_s: float, op_s: float) -> PairGroup:
        """Join the other end, which calls this at the same time: what both must know of each other travels by
        `keys`. Takes `attach_s` at most, each later call `op_s`. Blocks; raises OSError or RuntimeError.
        """
        ...


class GroupServer(StagingArea, Protocol):
    """Decode's ends of all groups."""

    async def serve(
        self, messages: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]]
    ) -> None: ...
