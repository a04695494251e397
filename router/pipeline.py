"""Pipeline: a request's way through the workers: place, prefill, generate, and again where something fails.

Owns retries, and is the only place that has them. The tokens that are out are facts: whatever dies, the
request goes on from them, under one deadline. Knows no text and no HTTP: a Reader takes the tokens and says
when it has enough. Lives on the event loop; each request is one task and one more for each call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from core.clock import Clock, Deadline
from core.errors import (
    DeadlineExceeded,
    NoWorkerAvailable,
    ServingError,
    StepFailed,
    WorkerDraining,
    WorkerLost,
)
from core.ids import TicketId, new_ticket_id
from core.jobs import GenerateEvent, GenerateJob, PrefillJob, PrefillResult, Reading
from core.request import FinishReason, Request
from router.config import RouterConfig
from router.decision import Plan
from router.legs import Cancels, Leg, Legs
from router.metrics import RouterMetrics
from router.placed import Placed
from router.placement_log import log_placed
from router.placer import Chosen, Placer
from router.pulls import Loan, Pulls
from router.reader import Reader
from router.sample_record import SampleRecord
from router.setbacks import Setbacks
from router.worker_entry import WorkerEntry
from router.worker_table import Sleep, WorkerTable

_ABORT_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One placement: its number, its ticket if there is a handoff, and the load it has reserved."""

    number: int
    ticket_id: TicketId | None
    placed: Placed


class Pipeline:
    """Serves requests on the workers of `table`."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        metrics: RouterMetrics,
        clock: Clock,
        chance: random.Random,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.config = config
        self.table = table
        self.metrics = metrics
        self.clock = clock
        self.placer = Placer(config, table, metrics, clock, chance)
        self._sleep = sleep
        self.cancels = Cancels()
        self.pulls = Pulls(config, self.placer.speeds.distances, metrics.reuse, self.cancels, clock)
        self._closed = asyncio.Event()

    async def serve(self, request: Request, reader: Reader, deadline: Deadline) -> None:
        """Give `reader` all tokens of all samples; returns when each has ended.

        Raises the ServingError that ended the request. Cancelling this call, the deadline, and a reader
        that has enough all stop the workers.
        """
        run = _Run(self, request, reader, deadline)
        work = asyncio.create_task(run.drive(), name=f"request {request.request_id}")
        timer = asyncio.ensure_future(self._sleep(deadline.left_s(self.clock)))
        closed = asyncio.create_task(self._closed.wait())
        reason = "the request has ended"
        try:
            await asyncio.wait({work, timer, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._closed.is_set():
                raise NoWorkerAvailable("the service stops before the answer is complete")
            if not work.done():
                raise DeadlineExceeded("the deadline passed before the answer was complete")
            await work
        except asyncio.CancelledError:
            reason = "the client has gone"
            raise
        except DeadlineExceeded:
            reason = "the deadline has passed"
            raise
        finally:
            timer.cancel()
            closed.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            for leg in run.legs.open:
                self.cancels.later(leg, request.request_id, reason)

    def close(self) -> None:
        """The service stops: end each request, open or to come, with NoWorkerAvailable."""
        self._closed.set()

    async def stop(self) -> None:
        """Wait for the cancels that are on their way; each is bounded in time."""
        await self.cancels.settle()


class _Run:
    """One request under way: its records, its setbacks and its open legs."""

    def __init__(self, pipeline: Pipeline, request: Request, reader: Reader, deadline: Deadline) -> None:
        self.legs = Legs()
        self._pipeline = pipeline
        self._config = pipeline.config
        self._table = pipeline.table
        self._placer = pipeline.placer
        self._clock = pipeline.clock
        self._request = request
        self._reader = reader
        self._deadline = deadline
        self._started_at = pipeline.clock.now()
        self._records = [SampleRecord(index) for index in range(request.num_samples)]
        self._setbacks = Setbacks(pipeline.config, pipeline.clock)
        self._num_attempts = 0
        self._has_prompt_logprobs = False

    async def drive(self) -> None:
        """Until all samples have ended."""
        await self._run_samples(self._records)

    async def _run_samples(self, records: Sequence[SampleRecord]) -> None:
        while live := [record for record in records if not record.is_finished]:
            if len(live) > 1 and any(record.emitted for record in live):
                await self._run_apart(live)
            else:
                await self._attempt(live)

    async def _run_apart(self, records: Sequence[SampleRecord]) -> None:
        """Samples that lost their common worker share no state any more: each goes on by itself."""
        tasks = [asyncio.create_task(self._run_samples([record])) for record in records]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempt(self, records: Sequence[SampleRecord]) -> None:
        """Place the samples and run them as far as it goes. A failure that is survived is a setback."""
        chosen = await self._place(records)
        assert chosen.placed is not None
        self._num_attempts += 1
        ticket_id = None if chosen.prefill is None else new_ticket_id()
        log_placed(self._request.request_id, self._num_attempts, ticket_id, chosen.decision)
        try:
            await self._run_placed(records, chosen, _Attempt(self._num_attempts, ticket_id, chosen.placed))
        finally:
            chosen.placed.close()

    async def _run_placed(self, records: Sequence[SampleRecord], chosen: Chosen, attempt: _Attempt) -> None:
        prefill, decode, ticket_id = chosen.prefill, chosen.decode, attempt.ticket_id
        if prefill is None or ticket_id is None:
            assert decode is not None
            await self._generate(records, decode, attempt)
            return
        if chosen.loan is not None:
            await self._pull(chosen.loan, prefill, attempt.placed)
        if not await self._prefill(records, prefill, decode, ticket_id, attempt):
            return
        live = [record for record in records if not record.is_finished]
        if live and decode is not None:
            await self._generate(live, decode, attempt, self.legs.of(prefill, ticket_id))
        elif live:
            self._note(StepFailed("prefill did not end a request of one token"), live, prefill)
        elif decode is not None:
            return  # ended by its first token: nobody will claim the ticket
        self.legs.close(self.legs.of(prefill, ticket_id))

    # ------------------------------------------------------------ placing

    async def _place(self, records: Sequence[SampleRecord]) -> Chosen:
        """Choose workers and reserve them, waiting for some if there are none. Raises when there is no time
        left for that.
        """
        tokens = (*self._request.prompt_token_ids, *records[0].emitted)
        demand = self._placer.demand(self._request, len(records[0].emitted), len(records))
        sought = self._placer.seek(self._request, tokens, demand)
        sought.urgent_at = (self._started_at + self._deadline.at) / 2
        give_up_at = self._give_up_at()
        while True:
            now = self._clock.now()
            chosen = sought.choose(self._setbacks, now)
            if chosen is not None and chosen.decision.plan is Plan.WAIT:
                hold_s = sought.hold_s(chosen.decision, now)
                # each request that ends makes room, but only time makes what is ahead less
                wait = self._table.wait_for_change if chosen.decision.gives_way else self._placer.hold
                await wait(hold_s)
                continue
            if chosen is not None:
                self._pipeline.metrics.placed(chosen.decision.plan)
                self._reader.placed(chosen.decision)
                return chosen
            usable = sought.usable_answerers()
            chance_at = self._setbacks.next_chance_at(usable, now)
            is_hopeless = now >= give_up_at and chance_at >= self._deadline.at
            if is_hopeless or self._setbacks.is_too_long_for(sought.answerers()):
                raise self._setbacks.final_error(usable)
            wake_at = chance_at if now >= give_up_at else min(chance_at, give_up_at)
            await self._table.wait_for_change(wake_at - now)

    def _give_up_at(self) -> float:
        """A request that was placed waits for a new worker almost to its deadline, a new one only so long."""
        total_s = max(0.0, self._deadline.at - self._started_at)
        latest = self._deadline.at - min(self._config.give_up_before_s, total_s / 2)
        if self._num_attempts > 0:
            return latest
        return min(latest, self._clock.now() + self._config.worker_wait_s)

    # ------------------------------------------------------------ calling

    async def _pull(self, loan: Loan, prefill: WorkerEntry, placed: Placed) -> None:
        request_id = self._request.request_id
        placed.pulled(await self._pipeline.pulls.pull(loan, prefill, request_id, self._deadline, self.legs))
        self._reader.pulled()

    async def _prefill(
        self,
        records: Sequence[SampleRecord],
        prefill: WorkerEntry,
        decode: WorkerEntry | None,
        ticket_id: TicketId,
        attempt: _Attempt,
    ) -> bool:
        """First tokens from a prefill worker; False after a setback. Its legs stay open if it succeeds."""
        legs = [Leg(prefill, ticket_id)] + ([Leg(decode, ticket_id)] if decode is not None else [])
        job = PrefillJob(
            request=self._request_for(records),
            samples=tuple(record.start() for record in records),
            ticket_id=ticket_id,
            decode=None if decode is None else decode.ref,
            attempt=attempt.number,
            time_left_s=self._deadline.left_s(self._clock),
        )
        self.legs.open += legs
        try:
            result = await prefill.until_lost(prefill.worker.prefill(job))
            attempt.placed.heard(result.num_cached_tokens)
            self._take(result)
        except ServingError as error:
            for leg in legs:
                self.legs.close(leg)
            if decode is not None and isinstance(error, WorkerLost):
                # nobody else can tell decode now, and the next attempt may need the room
                await self._pipeline.cancels.now(
                    legs[1], self._request.request_id, "prefill was lost", _ABORT_TIMEOUT_S
                )
            self._note(error, records, prefill, decode)
            return False
        if decode is None:
            self.legs.close(legs[0])
        return True

    async def _generate(
        self,
        records: Sequence[SampleRecord],
        decode: WorkerEntry,
        attempt: _Attempt,
        prefill_leg: Leg | None = None,
    ) -> None:
        """Follow a decode worker until the samples have ended, or up to a setback."""
        job = GenerateJob(
            request=self._request_for(records),
            samples=tuple(record.start() for record in records),
            ticket_id=attempt.ticket_id,
            attempt=attempt.number,
            time_left_s=self._deadline.left_s(self._clock),
        )
        leg = self.legs.of(decode, attempt.ticket_id)
        if leg is None:
            leg = Leg(decode, attempt.ticket_id)
            self.legs.open.append(leg)
        try:
            if await decode.until_lost(self._follow(leg, job, attempt.placed, records, prefill_leg)):
                self.legs.close(leg)
        except ServingError as error:
            self.legs.close(leg)
            self._note(error, records, decode)

    async def _follow(
        self,
        leg: Leg,
        job: GenerateJob,
        placed: Placed,
        records: Sequence[SampleRecord],
        prefill_leg: Leg | None,
    ) -> bool:
        """Read the stream; whether the worker itself ended all samples, so that nothing is left to cancel."""
        running = {record.sample_index for record in records}
        events = leg.entry.worker.generate(job)
        try:
            async for event in events:
                self.legs.close(prefill_leg)
                placed.heard(event.delta.num_cached_tokens)
                index = event.delta.sample_index
                if event.delta.finish_reason is not None:
                    running.discard(index)
                self._accept(event)
                if all(record.is_finished for record in records):
                    return not running
                if index in running and self._records[index].is_finished:
                    # its reader has enough; the others go on
                    running.discard(index)
                    self._pipeline.cancels.later(leg, self._request.request_id, "the sample has ended", index)
        finally:
            await _close(events)
        raise WorkerLost("the worker ended a stream early", worker_id=leg.entry.ref.worker_id)

    # ------------------------------------------------------------ taking

    def _take(self, result: PrefillResult) -> None:
        prompt_logprobs, reading = result.prompt_logprobs, Reading(result.queue_s, result.compute_s)
        for delta in result.deltas:
            delta = replace(delta, num_cached_tokens=result.num_cached_tokens)
            self._accept(GenerateEvent(delta, prompt_logprobs, reading))
            prompt_logprobs = ()

    def _accept(self, event: GenerateEvent) -> None:
        """Hand on what is new. Raises a WorkerError for a sample that its worker gave up."""
        delta = event.delta
        if not 0 <= delta.sample_index < len(self._records):
            raise StepFailed(f"the worker sent a sample {delta.sample_index} that nobody asked for")
        record = self._records[delta.sample_index]
        if record.is_finished:
            return
        is_given_up = delta.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
        fresh = record.take(replace(delta, finish_reason=None) if is_given_up else delta)
        prompt_logprobs = () if self._has_prompt_logprobs else event.prompt_logprobs
        self._has_prompt_logprobs |= bool(prompt_logprobs)
        if fresh is not None or prompt_logprobs:
            fresh = fresh or replace(delta, position=len(record.emitted), token_ids=(), logprobs=())
            has_enough = self._reader.read(GenerateEvent(fresh, prompt_logprobs, event.reading))
            record.is_finished = has_enough or (delta.finish_reason is not None and not is_given_up)
        if is_given_up and not record.is_finished:
            kind = WorkerDraining if delta.finish_reason is FinishReason.CANCELLED else StepFailed
            raise kind("the worker gave the request up")

    def _request_for(self, records: Sequence[SampleRecord]) -> Request:
        """The request as it goes on: what concerns the prompt's logprobs is asked for only until they
        are there.
        """
        sampling = self._request.sampling
        if sampling.prompt_logprobs is None or not (self._has_prompt_logprobs or records[0].emitted):
            return self._request
        return replace(
            self._request, sampling=replace(sampling, prompt_logprobs=None), is_prefix_cache_read=True
        )

    def _note(
        self,
        error: ServingError,
        records: Sequence[SampleRecord],
        callee: WorkerEntry,
        target: WorkerEntry | None = None,
    ) -> None:
        samples = [record.sample_index for record in records]
        self._setbacks.note(error, callee.ref, None if target is None else target.ref, samples)
        self._reader.lost(samples)
        self._pipeline.metrics.retried(error)


async def _close(events: AsyncIterator[GenerateEvent]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
