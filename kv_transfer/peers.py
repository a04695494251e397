"""Peers: one connection to each decode worker that tickets go to, shared by their sessions, closed when idle.

Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.clock import Clock
from core.errors import WorkerLost
from core.ids import WorkerRef
from kv_transfer.transport import Connect, Transport


@dataclass(slots=True)
class _Peer:
    transport: Transport
    num_users: int
    idle_since: float


class Peers:
    """Keyed by worker and epoch: a restarted worker is another peer."""

    def __init__(self, connect: Connect, clock: Clock, idle_s: float) -> None:
        self._connect = connect
        self._clock = clock
        self._idle_s = idle_s
        self._peers: dict[WorkerRef, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        return len(self._peers)

    @asynccontextmanager
    async def use(self, ref: WorkerRef) -> AsyncIterator[Transport]:
        """The transport to `ref`, kept open until its last user has left and it was idle for a while.

        Raises WorkerLost when all connections were closed.
        """
        if self._is_closed:
            raise WorkerLost("the sender is closed", worker_id=ref.worker_id)
        self._close_idle()
        peer = self._peers.get(ref)
        if peer is None:
            peer = self._peers[ref] = _Peer(self._connect(ref), 0, self._clock.now())
        peer.num_users += 1
        try:
            yield peer.transport
        finally:
            peer.num_users -= 1
            peer.idle_since = self._clock.now()

    async def close(self) -> None:
        """Close all connections; calls that still run on them end with WorkerLost."""
        self._is_closed = True
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            self._close(peer)
        await asyncio.gather(*self._closing)

    def _close_idle(self) -> None:
        now = self._clock.now()
        for ref, peer in list(self._peers.items()):
            if peer.num_users == 0 and now - peer.idle_since > self._idle_s:
                del self._peers[ref]
                self._close(peer)

    def _close(self, peer: _Peer) -> None:
        task = asyncio.create_task(peer.transport.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
