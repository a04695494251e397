"""RequestRecord: what became of one request, as its sender saw it.

Owns the moments and what follows from one request's alone; what many amount to is in `goodput`. The client
makes it, and so does the simulator. Immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """`REFUSED`: the server said that it takes no more (429, 503). `ERROR`: anything else that is no complete
    answer. `UNFINISHED`: the test ended first, which says nothing against the server but that it was slow.
    """

    COMPLETED = "completed"
    REFUSED = "refused"
    ERROR = "error"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Moments are seconds since the run's start.

    `due_s`: when it should have been sent; latencies count from here, so that a late sender does not flatter
    the server. `sent_s`: when sending began. `event_times_s`: when each piece of the answer that holds text
    arrived; an empty first piece that only opens the answer is none. `num_prompt_tokens` and
    `num_output_tokens` are the server's counts if it gives them; `planned_…` what was wanted. `detail` says
    what went wrong. Without `has_usage` the server counted nothing, and each event is taken for a token.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    event_times_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    detail: str = ""
    has_usage: bool = True

    @property
    def is_completed(self) -> bool:
        return self.outcome is Outcome.COMPLETED

    @property
    def send_lag_s(self) -> float:
        """How late the sender was."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None of an answer without a token. A token without text shows at the end."""
        if self.event_times_s:
            return self.event_times_s[0] - self.due_s
        return self.e2e_s if self.is_completed and self.num_output_tokens else None

    @property
    def e2e_s(self) -> float:
        """From when it was due to the answer's end."""
        return self.ended_s - self.due_s

    @property
    def pauses_s(self) -> list[float]:
        """Between one piece of text and the next: what a reader waits."""
        return [after - before for before, after in pairwise(self.event_times_s)]

    @property
    def longest_pause_s(self) -> float | None:
        return max(self.pauses_s, default=None)

    @property
    def tokens_per_event(self) -> float:
        """1 for a server that sends each token by itself."""
        return max(1.0, self.num_output_tokens / len(self.event_times_s)) if self.event_times_s else 1.0

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: each pause, divided by the tokens that one piece holds on average, since a
        server that sends four tokens at a time is not four times as slow.
        """
        return [pause / self.tokens_per_event for pause in self.pauses_s]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first piece; None if all came in one.

        The first piece's tokens took no part of that time: with the server's count N in E pieces the time is
        divided by N - N/E, which is the usual N - 1 where each token comes by itself.
        """
        if len(self.event_times_s) < 2:
            return None
        num_after = max(self.num_output_tokens, len(self.event_times_s)) - self.tokens_per_event
        return (self.event_times_s[-1] - self.event_times_s[0]) / num_after
