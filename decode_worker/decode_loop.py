"""DecodeLoop: everything that happens on the step thread of a decode worker.

Owns the scheduler, the inbox and the running generations, and so all access to pool and allocator. How steps
follow each other is the pipeline's, how jobs come to their tickets is the claims'. Knows no event loop: what
the streams get leaves through `deliver`, at most once per step, command or tick. Every method runs on the
step thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from core.clock import Clock, Deadline
from core.errors import Cancelled, DeadlineExceeded, ServingError, WorkerDraining
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef
from core.jobs import CancelJob, GenerateJob, LendJob
from core.worker_status import WorkerStatus
from decode_worker.admission import check_job
from decode_worker.claims import LIVE, Claims
from decode_worker.config import DecodeConfig
from decode_worker.generation import Generation
from decode_worker.generations import Generations
from decode_worker.inbox import Inbox
from decode_worker.loans import Loans
from decode_worker.metrics import TicketMetrics
from decode_worker.scheduler import Scheduler
from decode_worker.step_pipeline import StepPipeline
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, Stream
from engine.metrics import EngineMetrics
from engine.runner import ModelRunner
from kv_transfer.transport import Payload, WriteCheck

_log = logging.getLogger(__name__)


class DecodeLoop:
    """Commands, steps and ticks of one decode worker. `step` answers whether there was something to
    compute.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: DecodeConfig,
        ref: WorkerRef,
        clock: Clock,
        deliver: Callable[[Sequence[Delivery], Sequence[StepTokens]], None],
        metrics: EngineMetrics,
        ticket_metrics: TicketMetrics,
    ) -> None:
        self._runner = runner
        self._cache = runner.cache
        self._allocator = runner.cache.allocator
        self._config = config
        self._ref = ref
        self._clock = clock
        self._deliver = deliver
        self._metrics = metrics
        self._ticket_metrics = ticket_metrics
        self._scheduler = Scheduler(config, runner.cache, runner.model_config.eos_token_ids)
        self._inbox = Inbox(ref, runner.cache, runner.cache.pool, config, clock, ticket_metrics.observe_end)
        self._loans = Loans(runner.cache)
        self._generations = Generations(
            config,
            self._scheduler,
            runner.cache,
            runner.model_config.eos_token_ids,
            runner.max_context,
            metrics,
            clock,
        )
        self._claims = Claims(self._inbox, self._generations, clock, config.ticket_wait_s, self._end)
        self._pipeline = StepPipeline(
            runner, self._scheduler, self._generations, clock, metrics, end_failed=self._end
        )
        self.progress_at = clock.now()
        self.is_draining = False

    # ------------------------------------------------------------ commands: streams

    def begin(self, job: GenerateJob, stream: Stream, deadline: Deadline) -> None:
        """Run a job that no stream runs yet; a refusal ends its stream."""
        try:
            self._check(job)
        except ServingError as error:
            self._deliver([Delivery(stream, error=error)], ())
            return
        self._claims.open(self._generations.open(job, stream, deadline))
        self._flush()

    def cancel_stream(self, stream: Stream, reason: str) -> None:
        """Nobody listens to the stream any more."""
        generation = self._generations.of_stream(stream)
        if generation is not None:
            self._end(generation, Cancelled(reason))
            self._flush()

    def cancel(self, job: CancelJob) -> None:
        """Stop what the job means: all of its request, or what runs under its ticket, or one sample of
        that. A ticket that is not claimed is ended.
        """
        for generation in self._generations.of_request(job.request_id):
            if job.ticket_id is not None and generation.job.ticket_id != job.ticket_id:
                continue
            if job.sample_index is None:
                self._end(generation, Cancelled(job.reason))
            else:
                self._generations.end_sample(generation, job.sample_index)
        if job.ticket_id is not None and job.sample_index is None:
            self._inbox.abort(job.ticket_id)
        self._flush()

    def end_all(self, error: ServingError) -> None:
        """End every stream by `error` and every ticket that is not claimed, after the step that runs."""
        self._pipeline.settle()
        for generation in self._generations:
            self._end(generation, error)
        self._inbox.abort_all()
        self._flush()

    # ------------------------------------------------------------ commands: tickets

    def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        """See Inbox.offer. Refused too while sequences here wait for blocks or places: they were first."""
        if self.is_draining and self._inbox.state(ticket.ticket_id) is None:
            raise WorkerDraining("this worker takes no new work", worker_id=self._ref.worker_id)
        max_samples = 0
        if not self._scheduler.is_short and self._leaves_watermark(ticket):
            num_taken = self._scheduler.num_running + self._inbox.num_reserved_samples
            max_samples = self._config.max_num_seqs - num_taken
        return self._inbox.offer(ticket, time_left_s, max_samples)

    def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload | bytes,
        check: WriteCheck | None = None,
    ) -> None:
        self._inbox.write(ticket_id, first_index, num_blocks, payload, check)

    def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        self._inbox.commit(ticket_id, num_tokens, num_pushed_blocks)
        self._claims.settle(ticket_id)
        self._flush()

    def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        _log.info("ticket %s aborted by prefill: %s", ticket_id, reason)
        self._inbox.abort(ticket_id, time_left_s)
        self._claims.settle(ticket_id)
        self._flush()

    def keepalive(self, ticket_id: TicketId) -> None:
        self._inbox.keepalive(ticket_id)

    # ------------------------------------------------------------ commands: loans

    def begin_loan(self, job: LendJob) -> tuple[int, ...]:
        """See Loans.begin. Lends while it drains, too: what it holds serves others."""
        return self._loans.begin(job.ticket_id, job.block_hashes)

    def end_loan(self, ticket_id: TicketId) -> None:
        self._loans.end(ticket_id)

    # ------------------------------------------------------------ steps

    def step(self) -> bool:
        """Start a step and apply one, if anything can run."""
        if not self._pipeline.advance(self._inbox.num_reserved_samples):
            return False
        self._flush()
        self.progress_at = self._clock.now()
        self._metrics.observe_status(self.status())
        return True

    def tick(self) -> None:
        """Deadlines, silence, waiting claimers, gauges. Runs between steps and at least every idle tick."""
        now = self._clock.now()
        for generation in self._generations.take_overdue(now):
            self._end(generation, DeadlineExceeded("the deadline passed before the answer was complete"))
        self._inbox.expire()
        self._claims.settle_all()
        self._flush()
        if not self._scheduler.has_work:
            self.progress_at = now
        self._pipeline.observe_slots()
        self._metrics.observe_status(self.status())
        self._ticket_metrics.observe_states(self._inbox.num_by_state())

    # ------------------------------------------------------------ accounts

    @property
    def num_unfinished(self) -> int:
        """Jobs, tickets and loans that a drain waits for."""
        return len(self._generations) + self._inbox.num_unclaimed + len(self._loans)

    @property
    def has_work(self) -> bool:
        """Whether anything here holds blocks or waits for some."""
        return self._scheduler.has_work or self.num_unfinished > 0

    def observe_leak(self) -> None:
        """Export the difference that `check` asserts to be none."""
        self._metrics.observe_leak(self._allocator.leak_difference(self._tables()))

    def check(self) -> None:
        """Assert that each block's holders are the sequences, reservations and loans that list it."""
        self._allocator.check(self._tables())
        self._scheduler.check()

    @property
    def num_seqs(self) -> tuple[int, int]:
        """Of those that wait and of those that run."""
        return self._scheduler.num_waiting + len(self._claims), self._scheduler.num_running

    def status(self) -> WorkerStatus:
        allocator, scheduler = self._allocator, self._scheduler
        num_waiting, num_running = self.num_seqs
        return WorkerStatus(
            ref=self._ref,
            is_draining=self.is_draining,
            num_waiting=num_waiting,
            num_running=num_running,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_running_tokens=scheduler.num_running_tokens,
            num_blocks=allocator.num_blocks,
            num_free_blocks=allocator.num_free,
            num_cached_blocks=allocator.num_cached,
            num_held_blocks=allocator.num_held,
            num_quarantined_blocks=allocator.num_quarantined,
            max_num_seqs=self._config.max_num_seqs,
            prefill_tokens_per_s=self._metrics.prefill_tokens_per_s,
            step_s=self._metrics.step_s,
            num_shared_cores=self._runner.num_shared_cores,
            max_step_tokens=self._config.token_budget,
            max_chunk_tokens=self._config.prefill_chunk,
            alone=self._pipeline.costs.alone,
            beside=self._pipeline.costs.beside,
        )

    # ------------------------------------------------------------ inside

    def _check(self, job: GenerateJob) -> None:
        if self.is_draining and (job.ticket_id is None or self._inbox.state(job.ticket_id) not in LIVE):
            raise WorkerDraining("this worker takes no new work", worker_id=self._ref.worker_id)
        model, layout = self._runner.model_config, self._runner.layout
        check_job(
            job, self._runner.max_context, self._allocator.num_blocks * layout.block_size, model.vocab_size
        )

    def _end(self, generation: Generation, error: ServingError) -> None:
        self._claims.withdraw(generation)
        self._generations.end(generation, error)
        self._claims.release((generation,))

    def _leaves_watermark(self, ticket: HandoffTicket) -> bool:
        """Whether those who run keep room for their growth beside the ticket. An estimate; the reservation
        is exact.
        """
        num_running = self._scheduler.num_running
        if num_running == 0:
            return True
        num_new = ticket.layout.num_blocks(ticket.num_tokens + ticket.num_growth_tokens)
        if ticket.is_prefix_cache_read:
            num_new -= len(self._cache.match(ticket.block_hashes))
        num_spare = max(num_running, int(self._config.watermark * self._allocator.num_blocks))
        num_left: int = self._allocator.num_available - num_new
        return num_left >= num_spare

    def _tables(self) -> Iterator[Sequence[int]]:
        return chain(self._scheduler.tables(), self._inbox.tables(), self._loans.tables())

    def _flush(self) -> None:
        tokens = self._generations.take_tokens()
        deliveries, finished = self._generations.take_deliveries()
        self._claims.release(finished)
        if deliveries or tokens:
            self._deliver(deliveries, tokens)
