"""Prompt: one prefill job on this worker, from its admission to its first tokens.

Owns what is checked about a job before it may wait, and the stamps of its way. The step thread changes it; no
tensors, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ContextTooLong, InvalidRequest
from core.jobs import PrefillJob
from engine.sequence import Sequence, new_sequence


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt (with the emitted tokens of a resumed request) to be read once for all its samples.

    `is_sampled` is False when no token is wanted (`max_tokens` 0): the prompt is only read. `is_handed_over`
    says whether a ticket is offered when it starts. Times are seconds of the worker's clock.
    `num_uncached_tokens` is the estimate at admission. `num_handed_blocks` counts the blocks already given to
    the bridge.
    """

    job: PrefillJob
    sequence: Sequence
    is_sampled: bool
    is_handed_over: bool
    arrived_at: float
    deadline_at: float
    num_uncached_tokens: int = 0
    started_at: float | None = None
    num_handed_blocks: int = 0

    @property
    def sample_indices(self) -> tuple[int, ...]:
        return tuple(sample.sample_index for sample in self.job.samples)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to be computed: exact once it has started, before that as estimated when it came."""
        return self.num_uncached_tokens if self.started_at is None else self.sequence.num_uncomputed_tokens

    @property
    def num_samples(self) -> int:
        return len(self.job.samples)


def new_prompt(job: PrefillJob, max_context: int, vocab_size: int, now: float) -> Prompt:
    """The prompt of a job that this model can read.

    Raises InvalidRequest (naming the field) or ContextTooLong.
    """
    request = job.request
    emitted = _emitted(job)
    _check_tokens(request.prompt_token_ids, vocab_size, "prompt")
    _check_tokens(emitted, vocab_size, "emitted")
    _check_tokens(tuple(token_id for token_id, _ in request.sampling.logit_bias), vocab_size, "logit_bias")
    num_left = request.sampling.max_tokens - len(emitted)
    num_tokens = request.num_prompt_tokens + len(emitted)
    if num_tokens + min(1, max(0, num_left)) > max_context:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens; with an answer it exceeds the context of {max_context}",
            param="prompt",
            num_tokens=num_tokens,
            max_context=max_context,
        )
    can_continue = num_left > 1 and num_tokens + 1 < max_context
    return Prompt(
        job=job,
        sequence=new_sequence(request, job.samples[0].sample_index, emitted, max_context),
        is_sampled=num_left > 0,
        is_handed_over=job.decode is not None and can_continue,
        arrived_at=now,
        deadline_at=now + job.time_left_s,
        num_uncached_tokens=num_tokens,
    )


def _emitted(job: PrefillJob) -> tuple[int, ...]:
    if not job.samples:
        raise InvalidRequest("a prefill job needs at least one sample", param="samples")
    indices = [sample.sample_index for sample in job.samples]
    if len(set(indices)) != len(indices):
        raise InvalidRequest("a prefill job names each sample once", param="samples")
    emitted = job.samples[0].emitted
    if len(job.samples) > 1 and any(sample.emitted for sample in job.samples):
        raise InvalidRequest("samples that have tokens already are resumed one by one", param="samples")
    return emitted


def _check_tokens(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if not token_ids:
        if param == "prompt":
            raise InvalidRequest("the prompt is empty", param=param)
        return
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(f"{param} holds token ids outside 0..{vocab_size - 1}", param=param)
