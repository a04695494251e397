"""Sender: prefill's end of the bridge: one session for each ticket, over shared connections.

Lives on one asyncio loop. The only call that another thread may make is `SendSession.add_blocks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from core.clock import Clock, Deadline
from core.errors import LayoutMismatch, StaleEpoch
from core.handoff import HandoffTicket
from core.ids import WorkerRef
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.peers import Peers
from kv_transfer.session import BlockNames, SendSession
from kv_transfer.transport import BlockStore, Connect
from kv_transfer.warmer import Warmer
from protos.transfer_codec import ticket_id_bytes


class Sender:
    """`store` holds the leased blocks; `connect` makes a transport to a decode worker."""

    def __init__(
        self,
        store: BlockStore,
        own_ref: WorkerRef,
        connect: Connect,
        clock: Clock,
        metrics: TransferMetrics,
        config: BridgeConfig | None = None,
    ) -> None:
        self._store = store
        self._ref = own_ref
        self._clock = clock
        self._metrics = metrics
        self._config = config if config is not None else BridgeConfig()
        self._peers = Peers(connect, self._config.idle_connection_s)
        self._sessions: set[SendSession] = set()
        self._warmer = Warmer(self._peers, own_ref, store.layout, self._config, metrics.pairs)

    @property
    def num_sessions(self) -> int:
        """Sessions whose transfer has not ended yet."""
        return len(self._sessions)

    @property
    def num_connections(self) -> int:
        """To workers that tickets go to, or may go to."""
        return self._peers.num_connections

    def expect(self, members: Iterable[WorkerRef]) -> None:
        """Tickets may go to these, and to no others any more: make ready for them, in the background."""
        self._warmer.expect(members)

    def open(self, ticket: HandoffTicket, deadline: Deadline, names: BlockNames | None = None) -> SendSession:
        """Offer the ticket to its decode worker, in the background; `deadline` bounds all that follows.

        A decode worker whose blocks have another size is offered blocks of that size, if `names` tells what
        they are called and whole blocks of one are whole blocks of the other.

        Raises TransferCorrupt for an ill-formed ticket, StaleEpoch or LayoutMismatch for one that is not this
        worker's to send.
        """
        ticket_id_bytes(ticket.ticket_id)
        if (ticket.prefill.worker_id, ticket.prefill.epoch) != (self._ref.worker_id, self._ref.epoch):
            raise StaleEpoch("the ticket is of another prefill worker", ticket_id=ticket.ticket_id)
        differences = ticket.layout.differences(self._store.layout)
        if differences:
            raise LayoutMismatch(
                f"the ticket's blocks are not this pool's (ticket vs pool): {'; '.join(differences)}",
                differences="; ".join(differences),
            )
        return SendSession(
            ticket,
            deadline,
            self._store,
            self._peers,
            self._config,
            self._clock,
            self._metrics,
            self._sessions,
            names,
        )

    async def close(self) -> None:
        """Abort what still runs, then close the connections."""
        await self._warmer.close()
        await asyncio.gather(*(session.abort("the prefill worker stops") for session in list(self._sessions)))
        await self._peers.close()
