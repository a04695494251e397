"""Peers: one connection to each decode worker that tickets go to, shared by their sessions, closed when idle.

Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.errors import WorkerLost
from core.ids import WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.transport import Connect, Transport


@dataclass(slots=True)
class _Peer:
    transport: Transport
    layout: KVLayout | None = None
    num_users: int = 0
    idle: asyncio.TimerHandle | None = None


class Peers:
    """Keyed by worker and epoch: a restarted worker is another peer. A connection that nobody used for
    `idle_s` is closed, also if none is ever used again: a dead worker's would try to connect for ever.
    """

    def __init__(self, connect: Connect, idle_s: float) -> None:
        self._connect = connect
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
        peer = self._peers.get(ref)
        if peer is None:
            peer = self._peers[ref] = _Peer(self._connect(ref))
        if peer.idle is not None:
            peer.idle.cancel()
            peer.idle = None
        peer.num_users += 1
        try:
            yield peer.transport
        finally:
            peer.num_users -= 1
            if peer.num_users == 0 and not self._is_closed:
                loop = asyncio.get_running_loop()
                peer.idle = loop.call_later(self._idle_s, self._close_idle, ref)

    def layout_of(self, ref: WorkerRef) -> KVLayout | None:
        """In which layout a connected worker takes blocks, if it was learned that it is another one."""
        peer = self._peers.get(ref)
        return None if peer is None else peer.layout

    def learn_layout(self, ref: WorkerRef, layout: KVLayout) -> None:
        if (peer := self._peers.get(ref)) is not None:
            peer.layout = layout

    async def close(self) -> None:
        """Close all connections; calls that still run on them end with WorkerLost."""
        self._is_closed = True
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            self._close(peer)
        await asyncio.gather(*self._closing)

    def _close_idle(self, ref: WorkerRef) -> None:
        self._close(self._peers.pop(ref))

    def _close(self, peer: _Peer) -> None:
        if peer.idle is not None:
            peer.idle.cancel()
        task = asyncio.create_task(peer.transport.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
