"""SendSession: one ticket's way to decode: offer, push while the prompt is computed, commit; or abort.

Owns the ticket's tasks and its failure. It does not own the blocks: they are leased by prefill and must not
change until the session has ended. Lives on the IO loop, except `add_blocks`, which the step thread calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.block_hash import BlockHash
from core.clock import Clock, Deadline
from core.errors import Cancelled, LayoutMismatch, ServingError, TransferTimeout, WorkerLost
from core.handoff import HandoffTicket
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.peers import Peers
from kv_transfer.push import Push
from kv_transfer.push_queue import PushQueue
from kv_transfer.race import guarded
from kv_transfer.reblocking import Reblocking, reblocked
from kv_transfer.transport import BlockStore, Carriage, CommitClaim, Fence, Transport

_log = logging.getLogger(__name__)

BlockNames = Callable[[KVLayout], tuple[BlockHash, ...]]


@dataclass(frozen=True, slots=True)
class SendReceipt:
    """What a committed session did. `wait_s`: from the last computed token to the commit, what overlap did
    not hide; `push_s`: how long computed blocks waited for their acknowledgement.
    """

    num_held_blocks: int
    num_pushed_blocks: int
    num_pushed_bytes: int
    wait_s: float
    push_s: float


class SendSession:
    """Starts offering when made. A wait that is cancelled leaves the session running; `abort` ends it."""

    def __init__(
        self,
        ticket: HandoffTicket,
        deadline: Deadline,
        store: BlockStore,
        peers: Peers,
        config: BridgeConfig,
        clock: Clock,
        metrics: TransferMetrics,
        running: set[SendSession],
        names: BlockNames | None = None,
    ) -> None:
        """`names`: what the full blocks are called in another layout (None: they are sent as they are)."""
        self.ticket = ticket
        self._store = store
        self._names = names
        self._early: list[tuple[int, tuple[int, ...]]] = []  # added before the offer was answered
        self._reblocking: Reblocking | None = None
        self._fence = Fence.of(ticket)
        self._deadline = deadline
        self._peers = peers
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._all_running = running
        self._loop = asyncio.get_running_loop()
        self._queue = PushQueue(
            ticket.num_blocks, ticket.layout.block_bytes, config.frame_bytes, config.max_bytes_in_flight
        )
        self._push = Push(self._queue, store, self._fence, config, clock)
        self._added: set[int] = set()  # touched by the calling thread of add_blocks only
        self._abort_reason = ""
        self._is_told = False  # decode knows that the ticket is over
        self._finished_at: float | None = None
        self._held: asyncio.Future[tuple[int, ...] | ServingError] = self._loop.create_future()
        self._outcome: asyncio.Future[SendReceipt | ServingError] = self._loop.create_future()
        self._aborting: asyncio.Task[None] | None = None
        self._running = self._loop.create_task(self._run(), name=f"send {ticket.ticket_id}")
        running.add(self)

    @property
    def error(self) -> ServingError | None:
        """Why the session failed; None while it runs and after a commit."""
        outcome = self._outcome.result() if self._outcome.done() else None
        return outcome if isinstance(outcome, ServingError) else None

    @property
    def has_ended(self) -> bool:
        """Whether it is committed or has failed: no block is read any more."""
        return self._outcome.done()

    async def offered(self) -> tuple[int, ...]:
        """The indexes that decode holds already.

        Raises what decode refused with, WorkerLost, TransferTimeout or Cancelled.
        """
        held = await asyncio.shield(self._held)
        if isinstance(held, ServingError):
            raise held
        return held

    def add_blocks(self, first_index: int, block_ids: Sequence[int]) -> None:
        """Blocks `first_index` … are computed and will not change: send those that decode lacks.

        Each index once. The one call for another thread (always the same one); it never waits.
        """
        indexes = range(first_index, first_index + len(block_ids))
        assert indexes.start >= 0, f"{indexes} are not in the ticket"
        assert indexes.stop <= self.ticket.num_blocks, f"{indexes} are not in the ticket"
        assert self._added.isdisjoint(indexes), f"some of {indexes} were added before"
        self._added.update(indexes)
        self._loop.call_soon_threadsafe(self._add, first_index, tuple(block_ids))

    async def finish(self, num_tokens: int, computed_at: float | None = None) -> SendReceipt:
        """All blocks were added: push the rest, await all acknowledgements, commit. Raises why it failed.

        `computed_at`, on the sender's clock, is when the last of them was there, unless that is now.

        Calls of `add_blocks` that happened before are seen, whichever thread made them.
        """
        assert num_tokens == self.ticket.num_tokens, (
            f"{num_tokens} tokens are not the ticket's {self.ticket.num_tokens}"
        )
        if self._finished_at is None:
            self._finished_at = self._clock.now() if computed_at is None else computed_at
            self._push.finish()
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    async def ended(self) -> ServingError | None:
        """Wait until the session is committed (None) or has failed; from then on no block is read."""
        outcome = await asyncio.shield(self._outcome)
        return outcome if isinstance(outcome, ServingError) else None

    async def abort(self, reason: str) -> None:
        """End the ticket on both sides, in whatever state. Idempotent; does not raise when decode is gone.

        When it returns, no block is read any more, and decode was told or could not be reached within a
        bounded time.
        """
        if self._aborting is None or (self._aborting.done() and not self._is_told):
            self._aborting = self._loop.create_task(self._abort(reason))
        await asyncio.shield(self._aborting)

    # ------------------------------------------------------------ the life of the session

    async def _run(self) -> None:
        try:
            async with (
                asyncio.timeout(self._deadline.left_s(self._clock)),
                self._peers.use(self.ticket.decode) as transport,
            ):
                held = await self._offer_as_wanted(transport)
                self._learn(transport.carriage)
                self._queue.hold(held)
                self._early.clear()
                self._held.set_result(held)
                receipt = await guarded(self._push_and_commit(transport), self._push.watch(transport))
            self._settle(receipt)
        except asyncio.CancelledError:
            self._settle(
                Cancelled(f"the transfer was aborted: {self._abort_reason}", ticket_id=self.ticket.ticket_id)
            )
            raise
        except TimeoutError:
            await self._fail(
                TransferTimeout(
                    "the deadline passed before the KV was handed over", ticket_id=self.ticket.ticket_id
                )
            )
        except ServingError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001 - logged, and whoever waits for the session hears of it
            _log.exception("the transfer of ticket %s failed", self.ticket.ticket_id)
            await self._fail(ServingError(f"the transfer failed: {error!r}", ticket_id=self.ticket.ticket_id))
        finally:
            self._all_running.discard(self)

    async def _offer_as_wanted(self, transport: Transport) -> tuple[int, ...]:
        """In blocks of decode's size, if that is another one and they can be made."""
        known = self._peers.layout_of(self.ticket.decode)
        if known is not None and self._names is not None:
            return await self._offer(transport, self._renamed(known))
        try:
            return await self._offer(transport, self.ticket)
        except LayoutMismatch as error:
            block_size = error.details.get("block_size")
            wanted = reblocked(self.ticket.layout, block_size) if isinstance(block_size, int) else None
            if wanted is None or self._names is None:
                raise
            self._is_told = False
            held = await self._offer(transport, self._renamed(wanted))
        self._peers.learn_layout(self.ticket.decode, wanted)
        return held

    def _renamed(self, layout: KVLayout) -> HandoffTicket:
        """The same ticket in blocks of `layout`; from here on they are sent as such."""
        assert self._names is not None
        num_tokens, config = self.ticket.num_tokens, self._config
        store = self._reblocking = Reblocking(self._store, layout, num_tokens)
        self._queue = PushQueue(
            layout.num_blocks(num_tokens), layout.block_bytes, config.frame_bytes, config.max_bytes_in_flight
        )
        self._push = Push(self._queue, store, self._fence, config, self._clock)
        self._push.use_no_device()
        for first_index, block_ids in self._early:
            self._push_blocks(first_index, block_ids)
        if self._finished_at is not None:
            self._push.finish()
        return replace(self.ticket, layout=layout, block_hashes=self._names(layout))

    async def _offer(self, transport: Transport, ticket: HandoffTicket) -> tuple[int, ...]:
        time_left_s = self._deadline.left_s(self._clock)
        try:
            async with asyncio.timeout(min(self._config.silence_s, time_left_s)):
                return await transport.offer(ticket, time_left_s)
        except TimeoutError:
            raise TransferTimeout(
                "decode did not answer the offer",
                ticket_id=self.ticket.ticket_id,
                worker_id=self.ticket.decode.worker_id,
            ) from None
        except (WorkerLost, TransferTimeout):
            raise
        except ServingError:
            self._is_told = True  # decode refused: it keeps nothing that an abort would have to free
            raise

    def _learn(self, carriage: Carriage) -> None:
        if self._reblocking is not None and carriage.is_on_device:
            # a device copies blocks as they are
            self._push.use_no_room()
            carriage = Carriage("grpc", fallback="block_size")
        if carriage.frame_bytes is not None:
            self._queue.pack(carriage.frame_bytes)
        if carriage.fallback:
            self._metrics.count_fallback(carriage.fallback)
        self._metrics.pairs.choose(self.ticket.decode, carriage.way, carriage.fallback)

    async def _push_and_commit(self, transport: Transport) -> SendReceipt:
        await self._push.run(transport)
        assert self._finished_at is not None
        claim = CommitClaim(self.ticket.num_tokens, self._queue.num_pushed_blocks, self._queue.checksum)
        receipt = await self._push.until_heard(lambda: transport.commit(self._fence, claim))
        wait_s, push_s = self._clock.now() - self._finished_at, self._push.busy_s
        way = transport.carriage.way
        self._metrics.observe_handover(way, push_s, wait_s)
        self._metrics.pairs.deliver(self.ticket.decode, way, receipt.num_written_bytes, push_s)
        return SendReceipt(
            num_held_blocks=self._queue.num_blocks - receipt.num_written_blocks,
            num_pushed_blocks=receipt.num_written_blocks,
            num_pushed_bytes=receipt.num_written_bytes,
            wait_s=wait_s,
            push_s=push_s,
        )

    def _add(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        if self._outcome.done():
            return
        if not self._held.done():
            self._early.append((first_index, block_ids))
        self._push_blocks(first_index, block_ids)

    def _push_blocks(self, first_index: int, block_ids: tuple[int, ...]) -> None:
        if self._reblocking is None:
            self._push.add(first_index, block_ids)
            return
        for index in self._reblocking.add(first_index, block_ids):
            self._push.add(index, (index,))

    def _settle(self, outcome: SendReceipt | ServingError) -> None:
        if not self._held.done():
            assert isinstance(outcome, ServingError)
            self._held.set_result(outcome)
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    # ------------------------------------------------------------ its ends

    async def _fail(self, error: ServingError) -> None:
        self._metrics.count_failure("sender", error)
        if isinstance(error, LayoutMismatch):
            self._metrics.pairs.fail(self.ticket.decode, error.message)
        self._settle(error)  # first: nobody waits for the abort
        if not self._is_told:
            await self._tell(error.code)

    async def _abort(self, reason: str) -> None:
        self._abort_reason = reason
        self._running.cancel()
        await asyncio.wait((self._running,))
        self._all_running.add(self)
        # the task may have been cancelled before its first step
        self._settle(Cancelled(f"the transfer was aborted: {reason}", ticket_id=self.ticket.ticket_id))
        try:
            if not self._is_told:
                await self._tell(reason)
        finally:
            self._all_running.discard(self)

    async def _tell(self, reason: str) -> None:
        """Tell decode that the ticket is over, so that it frees at once; again while the connection breaks.

        If decode cannot be told in time, its own silence rule does.
        """
        left_s = max(self._deadline.left_s(self._clock), self._config.silence_s)
        try:
            async with (
                asyncio.timeout(self._config.abort_s),
                self._peers.use(self.ticket.decode) as transport,
            ):
                await self._push.until_heard(lambda: transport.abort(self._fence, reason, left_s))
            self._is_told = True
        except (ServingError, TimeoutError) as error:
            _log.info("decode was not told of the abort of ticket %s: %r", self.ticket.ticket_id, error)
