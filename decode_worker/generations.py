"""Generations: jobs turned into sequences, and step outputs turned into events.

Owns which sequence belongs to which job, how samples of one prompt part at the first token, and when a
sample is finished. Does not own tickets (the decode loop does) nor the order of running (the scheduler
does). Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from core.block_hash import hash_blocks
from core.clock import Clock, Deadline
from core.errors import Cancelled, Overloaded, ServingError
from core.handoff import HandoffTicket
from core.ids import RequestId
from core.jobs import GenerateJob
from core.request import FinishReason
from decode_worker.config import DecodeConfig
from decode_worker.deadlines import Deadlines
from decode_worker.generation import Generation
from decode_worker.scheduler import Scheduler
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, Stream
from engine.kv.cache import KVCache
from engine.kv.reservation import Reservation
from engine.metrics import EngineMetrics
from engine.sampling import SampledColumns
from engine.sequence import Sequence, finish_reason_after, new_sequence
from engine.step import SampledToken, StepOutput, StepPlan
from engine.stream_step import StreamStep


class Generations:
    """The jobs under way, by stream, and the events that their streams have not got yet."""

    def __init__(
        self,
        config: DecodeConfig,
        scheduler: Scheduler,
        cache: KVCache,
        eos_token_ids: frozenset[int],
        max_context: int,
        metrics: EngineMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._max_context = max_context
        self._metrics = metrics
        self._clock = clock
        self._by_stream: dict[Stream, Generation] = {}
        self._deadlines = Deadlines(lambda generation: self._by_stream.get(generation.stream) is generation)
        self._owners: dict[Sequence, Generation] = {}
        self._touched: dict[Generation, None] = {}
        self._deliveries: list[Delivery] = []
        self._tokens: list[StepTokens] = []

    def __len__(self) -> int:
        return len(self._by_stream)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._by_stream.values()))

    def of_stream(self, stream: Stream) -> Generation | None:
        return self._by_stream.get(stream)

    def of_request(self, request_id: RequestId) -> list[Generation]:
        return [item for item in self if item.job.request.request_id == request_id]

    def owner(self, sequence: Sequence) -> Generation | None:
        """The job of a sequence that is still wanted."""
        return self._owners.get(sequence)

    def take_overdue(self, now: float) -> list[Generation]:
        """Jobs whose deadline has come; each is told once."""
        return self._deadlines.take_overdue(now)

    # ------------------------------------------------------------ from job to sequences

    def open(self, job: GenerateJob, stream: Stream, deadline: Deadline) -> Generation:
        """Note a job; nothing of it runs yet."""
        generation = self._by_stream[stream] = Generation(job, stream, deadline)
        self._deadlines.add(generation)
        return generation

    def start_here(self, generation: Generation, skip: frozenset[int] = frozenset()) -> None:
        """Queue all samples (but `skip`) to be read from their first token. Raises Overloaded if the queue
        is full.

        Samples without emitted tokens are read once and part at their first token.
        """
        job = generation.job
        fresh = [s.sample_index for s in job.samples if not s.emitted and s.sample_index not in skip]
        resumed = [s for s in job.samples if s.emitted and s.sample_index not in skip]
        if self._scheduler.num_waiting >= self._config.max_waiting:
            raise Overloaded(
                "the decode queue is full", num_waiting=self._scheduler.num_waiting, retry_after_s=1
            )
        if fresh:
            sequence = new_sequence(job.request, fresh[0], (), self._max_context)
            self._own(generation, sequence)
            self._scheduler.add(sequence, tuple(fresh) if len(fresh) > 1 else ())
        for sample in resumed:
            sequence = new_sequence(job.request, sample.sample_index, sample.emitted, self._max_context)
            if not self._finish_if_over(generation, sequence):
                self._own(generation, sequence)
                self._scheduler.add(sequence)

    def match_ticket(self, generation: Generation, ticket: HandoffTicket) -> list[Sequence]:
        """Sequences of the job that can go on from the ticket's KV; none if it is not the KV of this job."""
        job = generation.job
        num_tokens = ticket.num_tokens
        if ticket.request_id != job.request.request_id:
            return []
        sequences = [
            new_sequence(job.request, sample.sample_index, sample.emitted, self._max_context)
            for sample in job.samples
        ]
        # at least one token is left to compute: its logits are what the next one is sampled from
        usable = [sequence for sequence in sequences if sequence.num_tokens > num_tokens]
        if not usable:
            return []
        covered = usable[0].token_ids[:num_tokens]
        root = self._cache.hash_root(job.request)
        if tuple(hash_blocks(root, covered, self._cache.layout.block_size)) != ticket.block_hashes:
            return []
        return [item for item in usable if item.token_ids[:num_tokens] == covered][: ticket.num_samples]

    def start_claimed(
        self, generation: Generation, sequences: list[Sequence], reservation: Reservation
    ) -> None:
        """Let `sequences` go on from the reservation's KV at the next step; the job's other samples are
        read here.
        """
        running = [item for item in sequences if not self._finish_if_over(generation, item)]
        if not running:
            self._cache.abandon(reservation)
        else:
            self._cache.claim(reservation, running)
            generation.note_claim(self._clock.now())
            self._touched[generation] = None
            for sequence in running:
                self._own(generation, sequence)
                self._scheduler.adopt(sequence)
        taken = frozenset(sequence.sample_index for sequence in sequences)
        if generation.unfinished - taken:
            self.start_here(generation, taken)

    def note_started(self, sequences: Iterable[Sequence]) -> None:
        """A step reads for these from here on."""
        now = self._clock.now()
        for sequence in sequences:
            generation = self._owners[sequence]
            if generation.started_at is None:
                generation.started_at = now

    # ------------------------------------------------------------ from outputs to events

    def apply(self, plan: StepPlan, output: StepOutput) -> None:
        """The step ran: count its tokens as computed, append what was sampled, end what is finished."""
        self._scheduler.advance(plan, output.streams.token_ids)
        if len(plan.streams):
            self._take_streams(plan.streams, output.streams)
        for index, item in enumerate(plan.chunks):
            sequence = item.sequence
            sequence.prompt_logprobs.extend(output.prompt_logprobs.get(index, ()))
            sampled = output.sampled[index]
            if sampled:
                self._take(sequence, sampled)
            elif sequence.num_uncomputed_tokens == 0:
                self._finish_reading(sequence)

    def _take_streams(self, streams: StreamStep, drawn: SampledColumns) -> None:
        """Each stream has its token already: those that end become events, the others go on as columns."""
        self._metrics.observe_generated(len(streams))
        is_ended = streams.is_ended_by(drawn.token_ids)
        if is_ended.any():
            going = np.flatnonzero(~is_ended)
            for index in np.flatnonzero(is_ended).tolist():
                self._take_last(streams.sequences[index], drawn, index)
            streams, drawn = streams.take(going), drawn.take(going)
        if len(streams):
            owners = self._owners
            self._tokens.append(
                StepTokens(
                    streams=[owners[sequence].stream for sequence in streams.sequences],
                    sample_indices=streams.traits["sample_index"].tolist(),
                    positions=streams.positions.tolist(),
                    token_ids=drawn.token_ids.tolist(),
                    num_cached_tokens=streams.traits["num_cached_tokens"].tolist(),
                    logprobs=drawn.logprobs,
                )
            )

    def _take_last(self, sequence: Sequence, drawn: SampledColumns, row: int) -> None:
        generation = self._owners[sequence]
        reason = finish_reason_after(sequence, self._eos_token_ids)
        assert reason is not None
        generation.emit(sequence, drawn.token(row, sequence.sample_index), reason)
        self._touched[generation] = None
        self._retire(sequence, reason.value)

    def _take(self, sequence: Sequence, sampled: tuple[SampledToken, ...]) -> None:
        generation = self._owners[sequence]
        generation.note_read(sequence, self._clock.now())
        samples = [sequence, *(self._fork(generation, sequence, token.sample_index) for token in sampled[1:])]
        self._scheduler.settle_first_samples(sequence)
        self._metrics.observe_generated(len(sampled))
        for sample, token in zip(samples, sampled, strict=True):
            assert sample.sample_index == token.sample_index
            prompt_logprobs = tuple(sample.prompt_logprobs) if sample.num_output_tokens == 0 else ()
            sample.append(token.token_id)
            reason = finish_reason_after(sample, self._eos_token_ids)
            generation.emit(sample, token, reason, prompt_logprobs)
            self._touched[generation] = None
            if reason is not None:
                self._retire(sample, reason.value)

    def _fork(self, generation: Generation, sequence: Sequence, sample_index: int) -> Sequence:
        """Another sample that parts from `sequence` here; without room for it, it is queued to be read
        again.
        """
        forked = self._cache.fork(sequence, sample_index)
        sample = forked or new_sequence(sequence.request, sample_index, (), self._max_context)
        self._own(generation, sample)
        self._scheduler.join(sample, sequence)
        return sample

    def _finish_reading(self, sequence: Sequence) -> None:
        """The prompt of a request without output is read."""
        generation = self._owners[sequence]
        prompt_logprobs = tuple(sequence.prompt_logprobs)
        for sample_index in self._scheduler.first_samples(sequence)[1:]:
            other = new_sequence(sequence.request, sample_index, (), self._max_context)
            generation.emit(other, None, FinishReason.LENGTH)
            self._metrics.observe_finish(FinishReason.LENGTH.value)
        generation.emit(sequence, None, FinishReason.LENGTH, prompt_logprobs)
        self._touched[generation] = None
        self._retire(sequence, FinishReason.LENGTH.value)

    # ------------------------------------------------------------ ends

    def end(self, generation: Generation, error: ServingError) -> None:
        """Stop a job: its sequences give their blocks back, its stream ends by `error`."""
        for sequence in list(generation.sequences):
            self._disown(sequence)
            self._scheduler.remove(sequence)
        reason = FinishReason.CANCELLED if isinstance(error, Cancelled) else FinishReason.ERROR
        for _ in generation.unfinished:
            self._metrics.observe_finish(reason.value)
        del self._by_stream[generation.stream]
        self._touched.pop(generation, None)
        self._deliveries.append(Delivery(generation.stream, tuple(generation.events), error=error))

    def end_sample(self, generation: Generation, sample_index: int) -> None:
        """Stop one sample; its siblings go on. Samples that still wait for their common first token have
        not parted, so none of them can be stopped alone.
        """
        for sequence in list(generation.sequences):
            if sequence.sample_index == sample_index and not self._scheduler.first_samples(sequence):
                self._retire(sequence, FinishReason.CANCELLED.value)
                generation.emit(sequence, None, FinishReason.CANCELLED)
                self._touched[generation] = None

    def take_tokens(self) -> list[StepTokens]:
        """Tokens since the last call of samples that go on; they come before the deliveries."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_deliveries(self) -> tuple[list[Delivery], list[Generation]]:
        """What else the streams are to get since the last call, and the jobs that are finished by it and
        forgotten here.
        """
        deliveries, self._deliveries = self._deliveries, []
        finished: list[Generation] = []
        for generation in self._touched:
            deliveries.append(generation.take_delivery())
            if generation.is_finished:
                finished.append(generation)
                del self._by_stream[generation.stream]
        self._touched.clear()
        return deliveries, finished

    def _finish_if_over(self, generation: Generation, sequence: Sequence) -> bool:
        """Emitted tokens may end a sample already: then there is nothing to compute."""
        reason = finish_reason_after(sequence, self._eos_token_ids) if sequence.num_output_tokens else None
        if reason is None:
            return False
        generation.emit(sequence, None, reason)
        self._touched[generation] = None
        self._metrics.observe_finish(reason.value)
        return True

    def _retire(self, sequence: Sequence, reason: str) -> None:
        self._disown(sequence)
        self._scheduler.remove(sequence)
        self._metrics.observe_finish(reason)

    def _own(self, generation: Generation, sequence: Sequence) -> None:
        generation.sequences.add(sequence)
        self._owners[sequence] = generation

    def _disown(self, sequence: Sequence) -> None:
        self._owners.pop(sequence).sequences.discard(sequence)
