"""What a decode worker takes: whether a Generate job can be run here at all.

Pure functions; no state, no waiting. Any thread.
"""

from __future__ import annotations

from core.errors import ContextTooLong, InvalidRequest
from core.jobs import GenerateJob
from core.request import Request


def max_tokens_held(request: Request, max_context: int) -> int:
    """Prompt and output tokens that one sample of the request may come to."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_context)


def check_job(job: GenerateJob, max_context: int, num_pool_tokens: int, vocab_size: int) -> None:
    """Raise InvalidRequest or ContextTooLong if the job could never be run here, whatever else runs.

    A sample has to fit the pool alone: then it always progresses, however often it is preempted.
    """
    request = job.request
    num_prompt, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
    if num_prompt < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max_tokens < 0:
        raise InvalidRequest("max_tokens must not be negative", param="max_tokens")
    if not job.samples:
        raise InvalidRequest("the job names no sample", param="samples")
    for token_ids in (request.prompt_token_ids, *(sample.emitted for sample in job.samples)):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequest(f"token ids must lie in 0..{vocab_size - 1}", param="prompt")
    num_needed = num_prompt + min(max_tokens, 1)
    if num_needed > max_context:
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens, the context is {max_context}, its output included",
            num_prompt_tokens=num_prompt,
            max_context=max_context,
        )
    num_held = max_tokens_held(request, max_context)
    if num_held > num_pool_tokens:
        raise ContextTooLong(
            f"prompt and max_tokens come to {num_held} tokens, this worker's KV pool holds {num_pool_tokens}",
            num_prompt_tokens=num_prompt,
            max_context=num_pool_tokens,
        )
