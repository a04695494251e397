"""StepCosts: what a step of this worker takes, learned from the steps it ran.

Owns the measured planes behind a `StepCost`: seconds over streams and their KV of steps that only decode,
seconds over prompt tokens and what they attend to of steps that read. Both twice: for steps that had the
host's cores alone, and for those beside another worker's (`engine.cores`). Used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.running_plane import RunningPlane
from core.worker_status import StepCost, num_pairs
from engine.step import StepPlan

# where what grows is thought to be as large as what is fixed, until steps of different sizes were seen
_TYPICAL_STREAMS, _TYPICAL_TOKENS = 8.0, 32.0
_TYPICAL_KV, _TYPICAL_PAIRS = 65_536.0, 262_144.0
# the same streams run for hundreds of steps: fewer do not tell their number from their KV
_DECODING_DECAY, _READING_DECAY = 0.9995, 0.995


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed: tokens of prompts, streams that got their next token, the KV tokens that these
    attended to, and the pairs of a prompt token and one before it.
    """

    num_prefill_tokens: int
    num_streams: int
    num_kv_tokens: int = 0
    num_pairs: float = 0.0


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
        self._decoding = RunningPlane(_TYPICAL_STREAMS, _TYPICAL_KV, _DECODING_DECAY)
        self._reading = RunningPlane(_TYPICAL_TOKENS, _TYPICAL_PAIRS, _READING_DECAY)

    def observe(self, seconds: float, work: StepWork) -> None:
        if not work.num_prefill_tokens:
            self._decoding.observe(work.num_streams, work.num_kv_tokens, seconds)
            return
        # the streams' share is known from steps without prompts; what is left is the prompt's
        _, stream_s, kv_s = self._decoding.coefficients
        of_streams = stream_s * work.num_streams + kv_s * work.num_kv_tokens
        self._reading.observe(work.num_prefill_tokens, work.num_pairs, max(0.0, seconds - of_streams))

    @property
    def cost(self) -> StepCost:
        decode_s, stream_s, kv_s = self._decoding.coefficients
        prefill_s, token_s, pair_s = self._reading.coefficients
        return StepCost(decode_s, stream_s, prefill_s, token_s, kv_s, pair_s)


def work_of(plan: StepPlan) -> StepWork:
    """What a step computes; to be asked before it is applied. A chunk of one token is a stream's."""
    num_tokens, pairs, num_streams, num_kv = 0, 0.0, len(plan.streams), 0
    if num_streams:
        num_kv = int(plan.streams.num_tokens.sum())
    for item in plan.chunks:
        num_new, num_before = item.num_scheduled_tokens, item.num_context_tokens
        if num_new > 1:
            num_tokens += num_new
            pairs += num_pairs(num_new, num_before)
        else:
            num_streams += 1
            num_kv += num_before + 1
    return StepWork(num_tokens, num_streams, num_kv, pairs)
