"""Generation: one Generate job on the step thread.

Owns which samples of the job are still running, their sequences, and the events not yet handed to the
stream. Does not decide what runs. Used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.clock import Deadline
from core.ids import TicketId
from core.jobs import GenerateEvent, GenerateJob
from core.request import FinishReason, TokenDelta, TokenLogprob
from decode_worker.stream import Delivery, Stream
from engine.sequence import Sequence
from engine.step import SampledToken


@dataclass(eq=False, slots=True)
class Generation:
    """A job under way. `waiting_since` is set while it waits for its ticket, `claimed` names the ticket it
    runs on.

    `stream` is only a name here: it is touched on the IO loop alone.
    """

    job: GenerateJob
    stream: Stream
    deadline: Deadline
    sequences: set[Sequence] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    waiting_since: float | None = None
    claimed: TicketId | None = None
    events: list[GenerateEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished.update(sample.sample_index for sample in self.job.samples)

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

    def take_delivery(self) -> Delivery:
        """Events since the last call, with the end of the stream if all samples are finished."""
        events, self.events = tuple(self.events), []
        return Delivery(self.stream, events, is_end=self.is_finished)
