"""PrefillWorker: the surface of a prefill worker, the same in one process and behind gRPC.

Owns the step thread and the calls under way, and wires the two: commands go to the step thread's queue, what
happened there comes back through the mailbox. Its public methods run on the IO loop that called `start`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import replace
from functools import partial

from prometheus_client import generate_latest

from core.awake import Awake
from core.clock import Clock
from core.errors import (
    Cancelled,
    DeadlineExceeded,
    ServingError,
    TransferTimeout,
    WorkerDraining,
    WorkerLost,
    WrongRole,
)
from core.ids import WorkerRef
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
from engine.runner import ModelRunner
from engine.step_thread import NewSteps, StepThread
from kv_transfer.feed import Feed
from kv_transfer.group_acceptor import offer_groups
from kv_transfer.load_news import LoadNews
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.shm_acceptor import offer_shared_memory
from kv_transfer.transport import Connect
from prefill_worker.borrower import Borrower
from prefill_worker.call import PrefillCall
from prefill_worker.calls import Calls
from prefill_worker.config import PrefillConfig
from prefill_worker.loop import PrefillLoop
from prefill_worker.mailbox import Mailbox
from prefill_worker.metrics import PrefillSeries
from prefill_worker.prompt import Prompt, new_prompt

_LATE_PREFILL_S = 60.0
_LEAVE_S = 5.0


class PrefillWorker:
    """Reads prompts, samples first tokens, hands the KV over. All errors are ServingErrors.

    What decode workers lend comes through its `receiver`, which the gRPC service or the loopback directory
    serves.
    `connect` makes the transport to a decode worker. `start` comes first, `stop` last; `leave` before it lets
    the engine go to another role while peers are still told. `feed` and `series` outlive the role, if given.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: PrefillConfig,
        ref: WorkerRef,
        clock: Clock,
        connect: Connect,
        new_steps: NewSteps = StepThread,
        feed: Feed | None = None,
        series: PrefillSeries | None = None,
        awake: Awake | None = None,
    ) -> None:
        series = series or PrefillSeries(config.model)
        self.ref = ref
        self.registry = series.registry
        self._runner = runner
        self._config = config
        self._clock = clock
        self._awake = awake or Awake(clock)
        self._is_draining = False
        self._load_news = LoadNews(config.status_period_s)
        self._checked_at = float("-inf")
        self._was_busy = False
        self._has_left = False
        self._emptied = asyncio.Event()
        self._feed = feed or Feed(ref.epoch)
        self._metrics = series.engine
        self._metrics.observe_weights(runner.weight_bytes)
        self._transfers = series.transfer
        self._sender = Sender(runner.cache.pool, ref, connect, clock, series.transfer, config.bridge)
        self._calls = Calls(
            self._sender,
            on_granted=lambda ticket_id: self._thread.post(partial(self._loop.granted, ticket_id)),
            on_closed=lambda ticket_id, state: self._thread.post(
                partial(self._loop.closed, ticket_id, state)
            ),
        )
        self._mailbox = Mailbox(self._calls)
        self._loop = PrefillLoop(
            runner,
            config,
            ref,
            clock,
            self._mailbox,
            self._metrics,
            series.tickets,
        )
        self._thread = new_steps(f"step {ref.worker_id}", self._step, self._tick)
        self._borrower = Borrower(ref.worker_id, self._loop.borrowed, self._thread.call, clock)
        self.receiver = Receiver(self._borrower, ref, runner.layout, series.transfer, clock)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Begin to serve, on the running loop."""
        io_loop = self._io_loop = asyncio.get_running_loop()
        allocator = self._runner.cache.allocator
        # blocks that an earlier role of this process left behind
        self._feed.append(
            [
                BlockEvent(BlockEventKind.STORED, name, parent)
                for name, parent in allocator.prefix_cache.items()
            ]
        )
        allocator.on_events = self._feed.append
        self._feed.start(io_loop)
        self._mailbox.open(io_loop)
        self._thread.start()

    def offer_shared_memory(self) -> None:
        """Let decode workers of this host lend through shared memory, as configured. On the running loop;
        raises InvalidConfig where it is required and cannot be had.
        """
        offer_shared_memory(self.receiver, self._config.borrowing)

    def offer_groups(self, host: str, security: PeerSecurity) -> None:
        """The same through process groups, whose sockets listen at `host`, for decode workers anywhere."""
        offer_groups(self.receiver, self._config.borrowing, security, self._runner.pair_groups(host))

    def expect(self, members: Iterable[WorkerRef]) -> None:
        """These decode workers are there at present: make ready for them, in the background. On the loop."""
        self._sender.expect(members)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, say so, finish what runs.

        What is left after `timeout_s` ends with WorkerDraining, so that it is placed elsewhere.
        """
        self._is_draining = self._borrower.is_draining = True
        await self._thread.call(self._announce_draining)
        if not await self._calls.wait_idle(timeout_s):
            self._abandon_all(WorkerDraining("the worker drains and its time is up"))
            await self._calls.wait_idle(2 * self._config.bridge.abort_s)

    async def leave(self, timeout_s: float) -> bool:
        """`drain`, and then stop stepping: whether nothing holds a block of the pool any more. Does not wait
        for peers that are to be told of what ends. Safe to call twice.
        """
        if self._has_left:
            return True
        self._is_draining = self._borrower.is_draining = True
        if self._thread.is_alive:
            error = WorkerDraining("the worker takes another role", worker_id=self.ref.worker_id)
            # a step that hangs must not keep the process from ending
            with contextlib.suppress(TimeoutError):
                async with self._awake.timeout(timeout_s + _LEAVE_S):
                    await self._thread.call(self._announce_draining)
                    if not await self._calls.wait_idle(timeout_s):
                        self._abandon_all(error)
                    await self._thread.call(partial(self._loop.borrowed.abort_all, self._clock.now()))
                    await self._emptied.wait()
            if not self._emptied.is_set():
                self._abandon_all(error)
        self._has_left = True
        await asyncio.to_thread(self._thread.stop)
        self._runner.cache.allocator.on_events = None
        self._feed.close()
        return self._emptied.is_set() and not self._thread.is_alive

    async def stop(self) -> None:
        """End everything; whoever still waits gets WorkerDraining. Safe to call twice."""
        await self.leave(0.0)
        await self._calls.wait_idle(2 * self._config.bridge.abort_s)
        await self._sender.close()
        await self.receiver.close()

    def is_healthy(self) -> bool:
        """The step thread lives, and if there is work it gets on with it while the process runs."""
        return self._thread.is_alive and self._awake.elapsed_s(self._loop.progress_at) < self._config.stall_s

    @property
    def num_calls(self) -> int:
        """Calls whose reply or ticket has not ended."""
        return len(self._calls)

    # ------------------------------------------------------------ the surface

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Read the prompt and sample first tokens; returns as soon as they are there and decode has room.

        Cancelling the call cancels the work. Raises RequestError, Overloaded, WorkerDraining, the
        HandoffError with which decode refused, StepFailed, Cancelled or DeadlineExceeded.
        """
        if self._is_draining:
            raise WorkerDraining("the worker takes no new work")
        if not self._thread.is_alive:
            raise WorkerLost("the worker's step thread does not run")
        vocab_size = self._runner.model_config.vocab_size
        prompt = new_prompt(job, self._runner.max_context, vocab_size, self._clock.now())
        call = self._calls.open(prompt)
        num_tokens = job.request.num_prompt_tokens
        self._feed.arrived(num_tokens, len(job.samples), self._runner.layout.num_blocks(num_tokens))
        admitted = asyncio.ensure_future(self._thread.call(partial(self._admit, prompt)))
        try:
            async with asyncio.timeout(job.time_left_s):
                # a step that hangs admits nobody; whoever is abandoned meanwhile goes elsewhere
                await asyncio.wait((admitted, call.reply), return_when=asyncio.FIRST_COMPLETED)
                if admitted.done():
                    admitted.result()
                result = await call.reply
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed before the first token")
            self._abandon(call, error)
            raise error from None
        except TransferTimeout:
            if self._clock.now() < prompt.deadline_at:
                raise
            # the hand-over saw the same deadline a moment earlier; decode is not to blame for it
            raise DeadlineExceeded("the deadline passed before the first token") from None
        except asyncio.CancelledError:
            self._abandon(call, Cancelled("the caller went away"))
            raise
        finally:
            # refused at admission, or given up: nobody will answer any more
            admitted.cancel()
            call.reply.cancel()
        # counted only now: tokens of a refused handoff are sampled again elsewhere
        self._metrics.observe_generated(sum(len(delta.token_ids) for delta in result.deltas))
        return result

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Raises WrongRole: this worker's role is to prefill."""
        raise WrongRole("this worker prefills, it does not generate", worker_id=self.ref.worker_id)

    async def lend(self, job: LendJob) -> LendResult:
        """Raises WrongRole: this worker's role is to prefill."""
        raise WrongRole("this worker prefills, it lends nothing", worker_id=self.ref.worker_id)

    async def cancel(self, job: CancelJob) -> None:
        """Stop what is done for the ticket, or without one for the whole request; abort and free."""
        calls = self._calls.matching(job)
        for call in calls:
            self._abandon(call, Cancelled(job.reason))
        if not calls and job.ticket_id is not None:
            self._thread.post(partial(self._loop.refuse_late, job.ticket_id, _LATE_PREFILL_S))

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
        """Assert that each block's holders are the prompts and leases that list it."""
        await self._thread.call(self._loop.check)

    # ------------------------------------------------------------ inside

    def _admit(self, prompt: Prompt) -> None:
        self._load_news.arrived()
        if self._loop.is_draining:
            # it came before the drain and is heard of behind it: whoever waits for the end counts on no more
            raise WorkerDraining("the worker takes no new work")
        self._loop.admit(prompt)

    def _abandon_all(self, error: ServingError) -> None:
        for call in self._calls:
            self._abandon(call, error)

    def _abandon(self, call: PrefillCall, error: ServingError) -> None:
        call.fail(error)
        self._thread.post(partial(self._loop.cancel, call.prompt, error))

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
        if self._loop.is_draining and not self._loop.has_work and not self._emptied.is_set():
            self._io_loop.call_soon_threadsafe(self._emptied.set)
        self._tell_load()
        now = self._clock.now()
        if now < self._checked_at + self._config.status_period_s:
            return
        self._checked_at = now
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
