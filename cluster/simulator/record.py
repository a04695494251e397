"""Record: what became of one simulated request, by its client's clock, filled as it goes."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from cluster.loadtest.record import Outcome, RequestRecord

_REFUSALS = frozenset({"overloaded", "no_worker_available"})


@dataclass(eq=False, slots=True)
class Record:
    """Times in seconds since the beginning; `token_times` are when each token came. `error`: the code of what
    it ended by, empty if it ended well. `num_cached_tokens` of the prompt were found where it was read.
    `held_s`: from its arrival to its last placement. `reader`, `decoder`: the workers of that.
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    # no list of objects: of a hundred thousand answers that would be most of what there is in memory
    token_times: MutableSequence[float] = field(default_factory=lambda: array("d"))
    plan: str = ""
    reader: str = ""
    decoder: str = ""
    num_attempts: int = 0
    held_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""

    def result(self) -> RequestRecord:
        """As a load test would have seen it."""
        return RequestRecord(
            index=self.number,
            due_s=self.arrival_s,
            sent_s=self.arrival_s,
            ended_s=self.ended_s,
            outcome=self._outcome,
            event_times_s=tuple(self.token_times),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.token_times),
            num_cached_tokens=self.num_cached_tokens,
            planned_prompt_tokens=self.num_prompt_tokens,
            planned_output_tokens=self.num_output_tokens,
            finish_reason=None if self.error else "stop",
            detail=self.error,
        )

    @property
    def _outcome(self) -> Outcome:
        if not self.error:
            return Outcome.COMPLETED
        return Outcome.REFUSED if self.error in _REFUSALS else Outcome.ERROR
