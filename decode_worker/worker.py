"""DecodeWorker: the surface of a decode worker, the same in one process and behind gRPC.

Owns the step thread, the streams and the receiver of the bridge, and wires them: commands go to the step
thread's queue, what a step produced comes back in one call to the loop. Its public methods run on the IO
loop that called `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import generate_latest

from core.awake import Awake
from core.clock import Clock, Deadline
from core.errors import InvalidRequest, WorkerDraining, WorkerLost, WrongRole
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SnapshotJob,
    WatchEvent,
)
from core.peer_security import PeerSecurity
from core.worker_status import Announcement, BlockEvent, BlockEventKind
from decode_worker.config import DecodeConfig
from decode_worker.decode_loop import DecodeLoop
from decode_worker.lender import Lender
from decode_worker.metrics import DecodeSeries
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, Stream
from decode_worker.streams import Streams
from engine.runner import ModelRunner
from engine.step_thread import NewSteps, StepThread
from kv_transfer.device_choice import shared_device
from kv_transfer.feed import Feed
from kv_transfer.group_acceptor import offer_groups
from kv_transfer.ipc_acceptor import offer_device_memory
from kv_transfer.load_news import LoadNews
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.shm_acceptor import offer_shared_memory
from kv_transfer.transport import Connect, Payload, WriteCheck

_STOP_S = 5.0


class DecodeWorker:
    """Receives KV, streams tokens, prefills by itself where no KV came. All errors are ServingErrors.

    It is the `ReservationPort` of its own `receiver`, which the gRPC service or the loopback directory
    serves. `connect` makes the transport to a prefill worker that it lends blocks to (None: it lends none).
    `start` comes first, `stop` last; `leave` before it lets the engine go to another role. `feed` and
    `series` outlive the role, if given.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: DecodeConfig,
        ref: WorkerRef,
        clock: Clock,
        new_steps: NewSteps = StepThread,
        connect: Connect | None = None,
        feed: Feed | None = None,
        series: DecodeSeries | None = None,
        awake: Awake | None = None,
    ) -> None:
        series = series or DecodeSeries(config.model)
        self.ref = ref
        self.registry = series.registry
        self._runner = runner
        self._config = config
        self._clock = clock
        self._awake = awake or Awake(clock)
        self._io_loop: asyncio.AbstractEventLoop | None = None
        self._load_news = LoadNews(config.status_period_s)
        self._checked_at = float("-inf")
        self._was_busy = False
        self._drained = asyncio.Event()
        self._is_leaving = self._has_left = False
        self._ending: asyncio.Task[None] | None = None
        self._feed = feed or Feed(ref.epoch)
        self._streams = Streams(config, clock, self._cancel_stream)
        self._transfers = series.transfer
        self.receiver = Receiver(self, ref, runner.layout, series.transfer, clock)
        self._lender: Lender | None = None
        if connect is not None:
            sender = Sender(runner.cache.pool, ref, connect, clock, series.transfer, config.lending)
            self._lender = Lender(sender, ref, runner.layout, clock, self)
        series.engine.observe_weights(runner.weight_bytes)
        self._loop = DecodeLoop(
            runner,
            config,
            ref,
            clock,
            self._deliver,
            series.engine,
            series.tickets,
        )
        self._thread = new_steps(f"step {ref.worker_id}", self._step, self._tick, pause_s=runner.pause_s)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Begin to serve, on the running loop."""
        self._io_loop = asyncio.get_running_loop()
        allocator = self._runner.cache.allocator
        # blocks that an earlier role of this process has left are told first
        known = allocator.prefix_cache.items()
        self._feed.append([BlockEvent(BlockEventKind.STORED, name, parent) for name, parent in known])
        self._feed.start(self._io_loop)
        allocator.on_events = self._feed.append
        self._thread.start()

    def offer_shared_memory(self) -> None:
        """Let prefill processes of this host push through shared memory, or from their GPU to this one's, as
        configured. On the running loop; raises InvalidConfig where one is required and cannot be had.
        """
        bridge = self._config.bridge
        offer_shared_memory(self.receiver, bridge)
        offer_device_memory(self.receiver, bridge, shared_device(self._runner.shared_pool, bridge.cuda_ipc))

    def offer_groups(self, host: str, security: PeerSecurity) -> None:
        """Let prefill workers anywhere push through process groups, as configured; their sockets listen at
        `host`. On the running loop; raises InvalidConfig where they are required and cannot be had.
        """
        offer_groups(self.receiver, self._config.bridge, security, self._runner.pair_groups(host))

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, say so, finish what runs.

        What is left after `timeout_s` ends with WorkerDraining, so that it is resumed elsewhere.
        """
        await self._thread.call(self._announce_draining)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        error = WorkerDraining("the worker drains and its time is up", worker_id=self.ref.worker_id)
        await self._thread.call(partial(self._loop.end_all, error))

    async def leave(self, timeout_s: float) -> bool:
        """`drain`, and then stop stepping: whether nothing holds a block of the pool any more. Safe to call
        twice.
        """
        if self._has_left:
            return True
        self._is_leaving = True
        is_empty = not self._thread.is_alive
        if self._thread.is_alive:
            # a step that hangs must not keep the process from ending
            with contextlib.suppress(TimeoutError):
                async with self._awake.timeout(timeout_s + _STOP_S):
                    await self.drain(timeout_s)
                    if self._lender is not None:
                        self._ending = asyncio.create_task(self._lender.close())
                    await self._drained.wait()
                    is_empty = True
        self._has_left = True
        await asyncio.to_thread(self._thread.stop)
        self._streams.end_all(WorkerDraining("the worker has stopped", worker_id=self.ref.worker_id))
        self._runner.cache.allocator.on_events = None
        self._feed.close()
        return is_empty and not self._thread.is_alive

    async def stop(self) -> None:
        """End everything; whoever still listens gets WorkerDraining. Safe to call twice."""
        await self.leave(0.0)
        if self._lender is not None:
            await self._lender.close()
        await self.receiver.close()

    def is_healthy(self) -> bool:
        """The step thread lives, and if there is work it gets on with it while the process runs."""
        return self._thread.is_alive and self._awake.elapsed_s(self._loop.progress_at) < self._config.stall_s

    # ------------------------------------------------------------ the surface

    async def generate(self, job: GenerateJob) -> AsyncGenerator[GenerateEvent, None]:
        """Tokens of each sample from its position on, until each has a finish reason.

        A job that runs already is joined and replayed. Closing the iterator detaches; when the last
        listener has gone, the job is cancelled after a short grace. Raises RequestError, Overloaded,
        WorkerDraining, StepFailed, Cancelled or DeadlineExceeded.
        """
        if not self._thread.is_alive:
            raise WorkerLost("the worker's step thread does not run", worker_id=self.ref.worker_id)
        deadline = Deadline.after(job.time_left_s, self._clock)
        stream, is_new = self._streams.open(job)
        if is_new:
            num_tokens = job.request.num_prompt_tokens if job.ticket_id is None else 0
            num_blocks = self._runner.layout.num_blocks(num_tokens)
            self._feed.arrived(num_tokens, len(job.samples), num_blocks)
            self._thread.post(partial(self._begin, job, stream, deadline))
        try:
            async for event in stream.follow(job):
                yield event
        finally:
            self._streams.close(stream)

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Raises WrongRole: this worker's role is to decode."""
        raise WrongRole("this worker generates, it does not prefill", worker_id=self.ref.worker_id)

    async def lend(self, job: LendJob) -> LendResult:
        """Send to a prefill worker what is cached here of a prompt; cancelling the call ends the transfer.

        Raises InvalidRequest, what the other end refused with, WorkerLost or TransferTimeout.
        """
        if self._lender is None:
            raise InvalidRequest("this worker has no way to prefill workers", param="worker")
        if self._is_leaving:
            raise WorkerDraining("this worker lends no more", worker_id=self.ref.worker_id)
        return await self._lender.lend(job)

    async def cancel(self, job: CancelJob) -> None:
        """Stop what the job means and free its blocks; end its ticket, known or not yet. See CancelJob."""
        await self._thread.call(partial(self._loop.cancel, job))

    def watch(self) -> AsyncGenerator[WatchEvent, None]:
        """The digest of the cached blocks, then numbered changes, and a status as sequences come or go."""
        return self._feed.subscribe()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        """Some of the cached blocks, as of now."""
        return self._feed.page(job)

    async def metrics(self) -> bytes:
        """All series of this worker in Prometheus' text format."""
        return generate_latest(self.registry)

    def announcement(self) -> Announcement:
        return Announcement(
            ref=self.ref,
            model=self._config.model,
            layout=self._runner.layout,
            max_context=self._runner.max_context,
            pid=os.getpid(),
            node=platform.node(),
            home_pool=self._config.home_pool,
            num_blocks=self._runner.cache.allocator.num_blocks,
        )

    async def check(self) -> None:
        """Assert that each block's holders are the sequences and reservations that list it."""
        await self._thread.call(self._loop.check)

    # ------------------------------------------------------------ the receiver's port

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        return await self._thread.call(partial(self._loop.offer, ticket, time_left_s))

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        await self._thread.call(partial(self._loop.write, ticket_id, first_index, num_blocks, payload, check))

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        await self._thread.call(partial(self._loop.commit, ticket_id, num_tokens, num_pushed_blocks))

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        await self._thread.call(partial(self._loop.abort, ticket_id, reason, time_left_s))

    async def keepalive(self, ticket_id: TicketId) -> None:
        await self._thread.call(partial(self._loop.keepalive, ticket_id))

    # ------------------------------------------------------------ the lender's vault

    async def begin_loan(self, job: LendJob) -> tuple[int, ...]:
        return await self._thread.call(partial(self._loop.begin_loan, job))

    def end_loan(self, ticket_id: TicketId) -> None:
        self._thread.post(partial(self._loop.end_loan, ticket_id))

    # ------------------------------------------------------------ inside

    def _begin(self, job: GenerateJob, stream: Stream, deadline: Deadline) -> None:
        self._load_news.arrived()
        self._loop.begin(job, stream, deadline)

    def _cancel_stream(self, stream: Stream) -> None:
        self._thread.post(partial(self._loop.cancel_stream, stream, "nobody listens any more"))

    def _deliver(self, deliveries: Sequence[Delivery], tokens: Sequence[StepTokens]) -> None:
        """On the step thread: one wake-up of the IO loop for all streams."""
        self._post_to_io(partial(self._streams.deliver, deliveries, tokens))

    def _post_to_io(self, call: Callable[[], None]) -> None:
        assert self._io_loop is not None
        self._io_loop.call_soon_threadsafe(call)

    def _announce_draining(self) -> None:
        self._loop.is_draining = True
        self._publish_status()

    def _step(self) -> bool:
        has_work = self._loop.step()
        self._tell_load()
        return has_work

    def _tick(self) -> None:
        """On the step thread, between steps."""
        self._loop.tick()
        if self._loop.is_draining and not self._loop.has_work:
            self._post_to_io(self._drained.set)
        self._tell_load()
        now = self._clock.now()
        if now < self._checked_at + self._config.status_period_s:
            return
        self._checked_at = now
        self._post_to_io(self._streams.sweep)
        self._loop.observe_leak()
        was_busy, self._was_busy = self._was_busy, self._loop.has_work
        if was_busy and not self._was_busy:
            self._loop.check()

    def _tell_load(self) -> None:
        if self._load_news.is_due(self._clock.now(), *self._loop.num_seqs):
            self._publish_status()

    def _publish_status(self) -> None:
        self._load_news.told(self._clock.now(), *self._loop.num_seqs)
        pairs = self._transfers.pairs.statuses()
        self._feed.publish_status(replace(self._loop.status(), pairs=pairs))
