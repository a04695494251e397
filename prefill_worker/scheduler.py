"""PrefillScheduler: which prompts wait, which are being read, and what the next step computes.

Policy only: no tensors, no I/O, time is an argument. Owned by the step thread. It asks for blocks through
`try_start` and never takes them back: a prompt is started only when all its blocks are there, so started
prompts always reach their end and none is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from core.errors import ContextTooLong, Overloaded
from engine.sequence import Sequence
from engine.step import ScheduledSequence, StepPlan
from prefill_worker.config import PrefillConfig
from prefill_worker.prompt import Prompt
from prefill_worker.queue_order import QueueOrder, aged_shortest
from prefill_worker.taper import num_tapered_tokens

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A step, the prompts it computes (parallel to `step.chunks`), and those among them that it starts."""

    step: StepPlan
    prompts: tuple[Prompt, ...]
    started: tuple[Prompt, ...]


class PrefillScheduler:
    """A bounded queue and the prompts under way.

    The first in the order is never overtaken for want of blocks: a long prompt waits for leases to end, it
    does not starve. A prompt under way may be overtaken by a shorter one between its chunks; it keeps its
    blocks.
    """

    def __init__(
        self,
        config: PrefillConfig,
        num_blocks: int,
        block_size: int,
        try_start: Callable[[Sequence], bool],
        order: QueueOrder | None = None,
    ) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._try_start = try_start
        self._order = order or aged_shortest(config.aging)
        self._waiting: list[Prompt] = []
        self._running: list[Prompt] = []

    def admit(self, prompt: Prompt, tokens_per_s: float) -> None:
        """Let `prompt` wait. `tokens_per_s` is the measured rate (0: unknown), from which Retry-After
        follows.

        Raises ContextTooLong for a prompt larger than the whole pool, Overloaded when the queue is full.
        """
        num_needed = -(-prompt.sequence.num_tokens // self._block_size)
        if num_needed > self._num_blocks:
            raise ContextTooLong(
                f"the prompt needs {num_needed} KV blocks, this worker has {self._num_blocks}",
                param="prompt",
                num_tokens=prompt.sequence.num_tokens,
                max_tokens=self._num_blocks * self._block_size,
            )
        if len(self._waiting) >= self._config.max_waiting:
            num_ahead = self.num_waiting_tokens + self.num_running_tokens
            wait_s = num_ahead / tokens_per_s if tokens_per_s > 0 else _MIN_RETRY_S
            raise Overloaded(
                f"{len(self._waiting)} prompts wait already",
                retry_after_s=round(min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s)), 1),
            )
        self._waiting.append(prompt)

    def plan(self, now: float, tokens_per_s: float = 0.0) -> PrefillPlan | None:
        """The next step, or None when nothing can be computed now. `tokens_per_s` is the measured rate.

        In the queue's order each prompt gets as much of the budget as is left; waiting ones are started while
        places and blocks last.
        """
        budget = self._config.token_budget
        scheduled: list[ScheduledSequence] = []
        prompts: list[Prompt] = []
        started: list[Prompt] = []

        def schedule(prompt: Prompt) -> int:
            num_tokens = prompt.sequence.num_uncomputed_tokens
            if prompt.is_handed_over:
                num_tokens = num_tapered_tokens(num_tokens, self._config.token_budget)
            num_tokens = min(budget, num_tokens)
            scheduled.append(
                ScheduledSequence(prompt.sequence, num_tokens, prompt.is_sampled, prompt.sample_indices)
            )
            prompts.append(prompt)
            return num_tokens

        can_start = True
        for prompt in sorted(self, key=lambda item: self._order(item, now, tokens_per_s)):
            if budget == 0:
                break
            if prompt.started_at is None:
                has_place = can_start and len(self._running) < self._config.max_num_seqs
                can_start = has_place and self._try_start(prompt.sequence)
                if not can_start:
                    continue
                self._waiting.remove(prompt)
                self._running.append(prompt)
                prompt.started_at = now
                started.append(prompt)
            budget -= schedule(prompt)
        if not scheduled:
            return None
        return PrefillPlan(StepPlan(tuple(scheduled)), tuple(prompts), tuple(started))

    def remove(self, prompt: Prompt) -> bool:
        """Forget `prompt`, wherever it is; False when it was not here (any more)."""
        for place in (self._running, self._waiting):
            if prompt in place:
                place.remove(prompt)
                return True
        return False

    def expired(self, now: float) -> list[Prompt]:
        """Prompts whose deadline has passed; the caller ends and removes them."""
        return [prompt for prompt in self if now >= prompt.deadline_at]

    def __iter__(self) -> Iterator[Prompt]:
        yield from self._running
        yield from self._waiting

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._running or prompt in self._waiting

    @property
    def running(self) -> tuple[Prompt, ...]:
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed for waiting prompts, as estimated when they came."""
        return sum(prompt.num_uncached_tokens for prompt in self._waiting)

    @property
    def num_running_tokens(self) -> int:
        return sum(prompt.sequence.num_uncomputed_tokens for prompt in self._running)
