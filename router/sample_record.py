"""SampleRecord: the facts of one sample, wherever it runs.

Owns the tokens that are out: they are never sampled again, never sent twice, and a worker that repeats or
skips some is found out by their positions. One per sample; used on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.errors import StepFailed
from core.jobs import SampleStart
from core.request import TokenDelta


@dataclass(eq=False, slots=True)
class SampleRecord:
    """`is_finished` once the sample has ended, by its worker or by whoever reads it."""

    sample_index: int
    emitted: list[int] = field(default_factory=list)
    is_finished: bool = False

    def start(self) -> SampleStart:
        """What a worker needs to go on from here."""
        return SampleStart(self.sample_index, tuple(self.emitted))

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """The part of `delta` that is new, None if nothing is. Raises StepFailed if it does not fit the
        facts.
        """
        num_known = len(self.emitted) - delta.position
        repeated = delta.token_ids[: max(0, num_known)]
        if num_known < 0 or tuple(self.emitted[delta.position :][: len(repeated)]) != repeated:
            raise StepFailed(
                f"the worker sent position {delta.position} of sample {self.sample_index}, "
                f"which does not continue the {len(self.emitted)} tokens that are out"
            )
        fresh = delta.token_ids[len(repeated) :]
        if not fresh and delta.finish_reason is None:
            return None
        position = len(self.emitted)
        self.emitted += fresh
        return replace(delta, position=position, token_ids=fresh, logprobs=delta.logprobs[len(repeated) :])
