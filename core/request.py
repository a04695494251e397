"""What a client asked for and what comes back: Request, SamplingParams, TokenDelta.

Owns the engine-side meaning of a request: token ids, no text. Text (stop strings, templates, UTF-8) belongs
to the router. Immutable; usable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.ids import RequestId


class FinishReason(StrEnum):
    """Why a sample ended.

    `STOP`: an end-of-sequence or stop id; `LENGTH`: max_tokens or the context limit.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; validated, and `seed` always set (drawn at admission if the client gave none).

    `top_k` 0 means off. `logprobs` None means not wanted, k ≥ 0 means the chosen token's and the k best.
    `prompt_logprobs` likewise for the prompt. `min_tokens` masks end-of-sequence and stop ids until that
    many tokens are out.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, immutable, as all workers see it.

    `num_samples` is the API's `n`: samples share the prompt's full blocks and differ in their sample index
    only. `cache_salt` keeps tenants' prefix caches apart (it is hashed into each block's name).
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    adapter: str = ""
    num_samples: int = 1
    cache_salt: str = ""
    priority: int = 0
    is_prefix_cache_read: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, from the raw (unbiased, unscaled) fp32 logits.

    `top` holds (token id, logprob) by logprob descending, then id ascending; the chosen token may lie
    outside it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly produced tokens of one sample.

    `position` is the output index of the first token here, so a receiver can drop what it has and notice
    what it lacks. `logprobs` is parallel to `token_ids` when asked for, else empty. `num_cached_tokens`
    counts prompt tokens whose KV this worker did not compute. A delta may carry a finish reason and no
    token.
    """

    sample_index: int
    position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
