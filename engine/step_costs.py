"""StepCosts: what a step of this worker takes, learned from the steps it ran.

Owns the measured lines behind a `StepCost`: seconds over streams of steps that only decode, seconds over
prompt tokens of steps that read. Both twice: for steps that had the host's cores alone, and for those beside
another worker's (`engine.cores`). Used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.running_line import RunningLine
from core.worker_status import StepCost

# where what grows is thought to be as large as what is fixed, until steps of different sizes were seen
_TYPICAL_STREAMS, _TYPICAL_TOKENS = 8.0, 32.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed: tokens of prompts, and streams that got their next token."""

    num_prefill_tokens: int
    num_streams: int


class StepCosts:
    """One per worker."""

    def __init__(self) -> None:
        self._alone, self._beside = _Lines(), _Lines()

    def observe(self, seconds: float, work: StepWork, was_beside: bool | None) -> None:
        """A step took `seconds`; `was_beside`: it had to share the host's cores. None, for a part of its
        time, says nothing about either price.
        """
        if was_beside is not None:
            (self._beside if was_beside else self._alone).observe(seconds, work)

    @property
    def alone(self) -> StepCost:
        """Of steps that had all cores (or are not known to have shared them)."""
        return self._alone.cost

    @property
    def beside(self) -> StepCost:
        """Of steps beside another worker's."""
        return self._beside.cost


class _Lines:
    def __init__(self) -> None:
        self._decoding = RunningLine(_TYPICAL_STREAMS)
        self._reading = RunningLine(_TYPICAL_TOKENS)

    def observe(self, seconds: float, work: StepWork) -> None:
        if not work.num_prefill_tokens:
            self._decoding.observe(work.num_streams, seconds)
            return
        # the streams' share is known from steps without prompts; what is left is the prompt's
        of_streams = self._decoding.coefficients[1] * work.num_streams
        self._reading.observe(work.num_prefill_tokens, max(0.0, seconds - of_streams))

    @property
    def cost(self) -> StepCost:
        return StepCost(*self._decoding.coefficients, *self._reading.coefficients)
