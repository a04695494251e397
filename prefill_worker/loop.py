"""PrefillLoop: plan, run, apply. What a prefill worker does on its step thread.

Owns the scheduler, the outbox and, through the cache, the blocks of all prompts and leases. It does not know
futures or connections: it tells a `PromptListener` what happened, and hears of tickets by `granted` and
`closed`. Every method runs on the step thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from core.block_hash import hash_blocks
from core.clock import Clock
from core.errors import Cancelled, DeadlineExceeded, ServingError, StepFailed
from core.handoff import HandoffTicket, TicketState
from core.ids import TicketId, WorkerRef
from core.jobs import PrefillResult
from core.worker_status import WorkerStatus
from engine.kv.cache import KVCache
from engine.metrics import EngineMetrics
from engine.runner import ModelRunner
from engine.step import ScheduledSequence, StepOutput, StepPlan
from engine.step_costs import StepCosts, work_of
from prefill_worker.borrowed import Borrowed
from prefill_worker.config import PrefillConfig
from prefill_worker.first_tokens import first_tokens
from prefill_worker.metrics import TicketMetrics
from prefill_worker.outbox import Outbox
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import PrefillScheduler

_log = logging.getLogger(__name__)


class PromptListener(Protocol):
    """Who is told about prompts. Called on the step thread, in order; returns at once."""

    def started(self, prompt: Prompt, ticket: HandoffTicket) -> None:
        """The first chunk is scheduled: offer the ticket now. It has to be closed, whatever happens."""

    def blocks_ready(self, prompt: Prompt, first_index: int, block_ids: tuple[int, ...]) -> None:
        """Leased blocks that hold their final content."""

    def computed(self, prompt: Prompt, result: PrefillResult, is_finished: bool) -> None:
        """First tokens are sampled, and all blocks ready unless `is_finished`: then no sample goes on."""

    def failed(self, prompt: Prompt, error: ServingError) -> None:
        """The prompt is gone, with this error."""

    def expired(self, ticket_id: TicketId) -> None:
        """The ticket's deadline has passed; its reading has to stop and be closed."""


class PrefillLoop:
    """All state of a prefill worker's step thread. `step` answers whether there was something to do."""

    def __init__(
        self,
        runner: ModelRunner,
        config: PrefillConfig,
        ref: WorkerRef,
        clock: Clock,
        listener: PromptListener,
        metrics: EngineMetrics,
        ticket_metrics: TicketMetrics,
    ) -> None:
        self._runner = runner
        self._cache: KVCache = runner.cache
        self._config = config
        self._ref = ref
        self._clock = clock
        self._listener = listener
        self._metrics = metrics
        self._costs = StepCosts()
        self._ticket_metrics = ticket_metrics
        self._block_size = runner.layout.block_size
        allocator = self._cache.allocator
        self._scheduler = PrefillScheduler(
            config, allocator.num_blocks, self._block_size, self._cache.try_start
        )
        self._outbox = Outbox(allocator)
        self.borrowed = Borrowed(ref.worker_id, self._cache, self._cache.pool, config.borrowing_silence_s)
        self._tickets: dict[TicketId, Prompt] = {}
        self.progress_at = clock.now()
        self.is_draining = False

    # ------------------------------------------------------------ commands

    def admit(self, prompt: Prompt) -> None:
        """Let a prompt wait. Raises RequestError, Overloaded, or Cancelled if its cancellation came first."""
        now = self._clock.now()
        ticket_id = prompt.job.ticket_id
        if ticket_id:
            self._outbox.check_new(ticket_id, now)
        cached = self._cache.count_cached_tokens(prompt.sequence)
        prompt.num_uncached_tokens = prompt.sequence.num_tokens - cached
        self._scheduler.admit(prompt, self._metrics.prefill_tokens_per_s)
        if ticket_id:
            self._outbox.remember(ticket_id, prompt.deadline_at)

    def cancel(self, prompt: Prompt, error: ServingError) -> None:
        """Stop computing `prompt` and free its blocks, except those that its ticket still reads."""
        self._end(prompt, error)

    def refuse_late(self, ticket_id: TicketId, lifetime_s: float) -> None:
        """A ticket was cancelled that no prefill bears here: refuse its prefill if that comes late. If
        blocks are lent under it, they are not wanted any more.
        """
        now = self._clock.now()
        self._outbox.remember(ticket_id, now + lifetime_s, is_cancelled=True)
        self.borrowed.abort(ticket_id, now)

    def granted(self, ticket_id: TicketId) -> None:
        """Decode has reserved room for the ticket."""
        self._outbox.grant(ticket_id)

    def closed(self, ticket_id: TicketId, state: TicketState) -> None:
        """Nobody reads the ticket's blocks any more; it ended as `state`, unless it had expired here.

        A prompt that is still computed for it stops.
        """
        now = self._clock.now()
        self.progress_at = now
        self._outbox.end(ticket_id, state)
        self._outbox.close(ticket_id, now)
        self._observe_tickets()
        prompt = self._tickets.pop(ticket_id, None)
        if prompt is not None:
            self._end(prompt, Cancelled("the handoff of this prompt has ended"))

    # ------------------------------------------------------------ stepping

    def step(self) -> bool:
        """One step, if there is anything to compute."""
        plan = self._scheduler.plan(self._clock.now(), self._metrics.prefill_tokens_per_s)
        if plan is None:
            return False
        for prompt in plan.started:
            self._start(prompt)
        before = self._clock.now()
        self._observe_slots(before)
        work = work_of(plan.step)
        self._run(plan.step.chunks, plan.prompts)
        now = self._clock.now()
        self.progress_at = now
        self._metrics.observe_step(now - before, plan.step.num_tokens)
        self._costs.observe(now - before, work, self._runner.was_beside)
        self._observe_slots(now)
        self._metrics.observe_status(self.status())
        return True

    def tick(self) -> None:
        """Deadlines, silence, gauges. Runs between steps and at least every idle tick."""
        now = self._clock.now()
        for prompt in self._scheduler.expired(now):
            self._end(prompt, DeadlineExceeded("the deadline passed before the prompt was read"))
        for ticket_id in self._outbox.expire(now):
            _log.warning("ticket %s expired", ticket_id)
            self._listener.expired(ticket_id)
        self.borrowed.expire(now)
        if not self.has_work:
            self.progress_at = now
        self._observe_slots(now)
        self._metrics.observe_status(self.status())
        self._observe_tickets()

    def check(self) -> None:
        """Assert that each block's holders are the prompts, leases and borrowed tickets that list it."""
        self._cache.allocator.check(self._tables())

    def observe_leak(self) -> None:
        """Export the difference that `check` asserts to be none."""
        self._metrics.observe_leak(self._cache.allocator.leak_difference(self._tables()))

    @property
    def has_work(self) -> bool:
        num_prompts = self._scheduler.num_waiting + self._scheduler.num_running
        return num_prompts + len(self._outbox) + len(self.borrowed) > 0

    @property
    def num_seqs(self) -> tuple[int, int]:
        """Of those that wait and of those that run."""
        return self._scheduler.num_waiting, self._scheduler.num_running

    def status(self) -> WorkerStatus:
        allocator, scheduler = self._cache.allocator, self._scheduler
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
            alone=self._costs.alone,
            beside=self._costs.beside,
        )

    # ------------------------------------------------------------ inside

    def _start(self, prompt: Prompt) -> None:
        self._metrics.observe_start(prompt.sequence)
        if not prompt.is_handed_over:
            return
        ticket = self._ticket(prompt)
        self._tickets[ticket.ticket_id] = prompt
        self._outbox.open(ticket, prompt.deadline_at)
        self._listener.started(prompt, ticket)
        # cached blocks need no computing: they travel while the first chunk is read
        self._lease_blocks(prompt, prompt.sequence.num_computed_tokens // self._block_size)

    def _ticket(self, prompt: Prompt) -> HandoffTicket:
        job, sequence = prompt.job, prompt.sequence
        assert job.decode is not None
        num_left = min(
            job.request.sampling.max_tokens - sequence.num_output_tokens,
            sequence.max_context - sequence.num_tokens,
        )
        root = self._cache.hash_root(job.request)
        return HandoffTicket(
            ticket_id=job.ticket_id,
            request_id=job.request.request_id,
            prefill=self._ref,
            decode=job.decode,
            layout=self._runner.layout,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(hash_blocks(root, sequence.token_ids, self._block_size)),
            num_samples=prompt.num_samples,
            num_growth_tokens=min(num_left, self._block_size),
            is_prefix_cache_read=job.request.is_prefix_cache_read,
        )

    def _run(self, scheduled: tuple[ScheduledSequence, ...], prompts: tuple[Prompt, ...]) -> None:
        """Compute and apply; if that fails, one by one, so that only prompts which fail alone are lost.

        Nothing of a failed step was applied, and computing a token again writes the same KV to the same
        slots.
        """
        try:
            output = self._runner.run(StepPlan(scheduled))
        except Exception as error:  # noqa: BLE001 (logged, and told to the prompt that it hits)
            _log.exception("a step of %d sequences failed", len(prompts))
            if len(prompts) == 1:
                self._end(prompts[0], _step_failed(error))
                return
            for item, prompt in zip(scheduled, prompts, strict=True):
                self._run((item,), (prompt,))
        else:
            self._apply(scheduled, prompts, output)

    def _apply(
        self, scheduled: tuple[ScheduledSequence, ...], prompts: tuple[Prompt, ...], output: StepOutput
    ) -> None:
        for index, (item, prompt) in enumerate(zip(scheduled, prompts, strict=True)):
            sequence = prompt.sequence
            is_read = item.reaches_end
            sequence.num_computed_tokens += item.num_scheduled_tokens
            sequence.prompt_logprobs.extend(output.prompt_logprobs.get(index, ()))
            self._cache.publish_full(sequence)
            if is_read:
                self._finish(prompt, output, index)
            elif prompt.is_handed_over:
                self._lease_blocks(prompt, sequence.num_computed_tokens // self._block_size)

    def _finish(self, prompt: Prompt, output: StepOutput, index: int) -> None:
        now = self._clock.now()
        assert prompt.started_at is not None
        sampled = output.sampled[index]
        deltas = first_tokens(
            prompt.sequence, prompt.sample_indices, sampled, self._runner.model_config.eos_token_ids
        )
        result = PrefillResult(
            deltas=deltas,
            num_cached_tokens=prompt.sequence.num_cached_tokens,
            queue_s=prompt.started_at - prompt.arrived_at,
            compute_s=now - prompt.started_at,
            prompt_logprobs=tuple(prompt.sequence.prompt_logprobs),
        )
        is_finished = all(delta.finish_reason is not None for delta in deltas)
        if prompt.is_handed_over and not is_finished:
            self._clear_tail(prompt)
            self._lease_blocks(prompt, len(prompt.sequence.block_table), is_last=True)
        for delta in deltas:
            self._metrics.observe_finish(delta.finish_reason.value if delta.finish_reason else "handed_over")
        self._forget(prompt)
        self._listener.computed(prompt, result, is_finished)

    def _clear_tail(self, prompt: Prompt) -> None:
        """A tail block travels whole:

        Behind its last token must not travel what another tenant left there.
        """
        num_full, num_tail = divmod(prompt.sequence.num_computed_tokens, self._block_size)
        if num_tail:
            self._cache.pool.clear_slots(prompt.sequence.block_table[num_full], num_tail)

    def _lease_blocks(self, prompt: Prompt, num_blocks: int, is_last: bool = False) -> None:
        """Give the bridge the blocks up to `num_blocks`, which nobody writes any more."""
        first = prompt.num_handed_blocks
        block_ids = tuple(prompt.sequence.block_table[first:num_blocks])
        ticket_id = prompt.job.ticket_id
        if not block_ids or self._outbox.has_ended(ticket_id):
            return
        self._outbox.add_blocks(ticket_id, block_ids, is_last)
        prompt.num_handed_blocks = num_blocks
        self._listener.blocks_ready(prompt, first, block_ids)

    def _end(self, prompt: Prompt, error: ServingError) -> None:
        if prompt not in self._scheduler:
            return
        self._metrics.observe_finish("cancelled" if isinstance(error, Cancelled) else "error")
        self._forget(prompt)
        self._listener.failed(prompt, error)

    def _forget(self, prompt: Prompt) -> None:
        self._scheduler.remove(prompt)
        self._cache.release(prompt.sequence)
        self._tickets.pop(prompt.job.ticket_id, None)

    def _tables(self) -> Iterator[Sequence[int]]:
        for prompt in self._scheduler.running:
            yield prompt.sequence.block_table
        yield from self._outbox.tables()
        yield from self.borrowed.tables()

    def _observe_tickets(self) -> None:
        self._ticket_metrics.observe(self._outbox.num_by_state(), self._outbox.num_ended)

    def _observe_slots(self, now: float) -> None:
        sequences = [prompt.sequence for prompt in self._scheduler.running]
        num_blocks = sum(len(sequence.block_table) for sequence in sequences)
        num_computed = sum(sequence.num_computed_tokens for sequence in sequences)
        self._metrics.observe_slots(num_blocks * self._block_size, num_computed, now)


def _step_failed(error: Exception) -> StepFailed:
    """What a step's prompts hear; the message of an unknown error stays in the log."""
    if isinstance(error, StepFailed):
        return error
    return StepFailed(f"the engine failed on this step ({type(error).__name__})")
