"""Generation: one Generate job on the step thread.

Owns which samples of the job are still running, their sequences, and the events not yet handed to the
stream. Does not decide what runs. Used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.clock import Deadline
from core.ids import TicketId
from core.jobs import GenerateEvent, GenerateJob, Reading
from core.request import FinishReason, TokenDelta, TokenLogprob
from core.telemetry import StallCause
from decode_worker.stream import Delivery, Stream
from engine.sequence import Sequence
from engine.step import SampledToken


@dataclass(eq=False, slots=True)
class Generation:
    """A job under way. `waiting_since` is set while it waits for its ticket, `claimed` names the ticket it
    runs on.

    `stream` is only a name here: it is touched on the IO loop alone. `started_at`: when a step first read for
    it; `reading` is told with the next event.
    """

    job: GenerateJob
    stream: Stream
    deadline: Deadline
    sequences: set[Sequence] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    waiting_since: float | None = None
    claimed: TicketId | None = None
    events: list[GenerateEvent] = field(default_factory=list)
    started_at: float | None = None
    reading: Reading | None = None
    is_begun: bool = False

    def __post_init__(self) -> None:
        self.unfinished.update(sample.sample_index for sample in self.job.samples)

    @property
    def arrived_at(self) -> float:
        """When the call came, which was before the step thread heard of it."""
        return self.deadline.at - self.job.time_left_s

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    def emit(
        self,
        sequence: Sequence,
        token: SampledToken | None,
        finish_reason: FinishReason | None,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Note that `token` (already the last of `sequence`) was sampled, or that it ends without one."""
        if finish_reason is not None:
            sequence.finish_reason = finish_reason
            self.unfinished.discard(sequence.sample_index)
        num_new = 0 if token is None else 1
        logprobs = () if token is None or token.logprob is None else (token.logprob,)
        delta = TokenDelta(
            sample_index=sequence.sample_index,
            position=sequence.num_output_tokens - num_new,
            token_ids=() if token is None else (token.token_id,),
            logprobs=logprobs,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        self.events.append(GenerateEvent(delta, prompt_logprobs))

    def note_claim(self, now: float) -> None:
        """Its KV is here."""
        self.is_begun = True
        self.reading = Reading(wait_s=max(0.0, now - self.arrived_at))

    def note_read(self, sequence: Sequence, now: float) -> None:
        """`sequence` was read up to a token that is about to be emitted. Worth telling the first time, and
        when it was read for the second time.
        """
        if not self.is_begun:
            self.is_begun = True
            started_at = now if self.started_at is None else self.started_at
            cause = None if self.job.ticket_id is None else StallCause.LOCAL_PREFILL
            self.reading = Reading(
                queue_s=max(0.0, started_at - self.arrived_at), compute_s=now - started_at, cause=cause
            )
        elif sequence.num_preemptions and sequence.num_output_tokens:
            self.reading = Reading(cause=StallCause.PREEMPT)

    def take_delivery(self) -> Delivery:
        """Events since the last call, with the end of the stream if all samples are finished."""
        events, self.events = tuple(self.events), []
        reading, self.reading = self.reading, None
        return Delivery(self.stream, events, is_end=self.is_finished, reading=reading)
