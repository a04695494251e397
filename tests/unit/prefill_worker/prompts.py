"""Prompts and caches for the tests of this folder."""

from __future__ import annotations

from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from core.jobs import PrefillJob, SampleStart
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from prefill_worker.prompt import Prompt, new_prompt

DECODE = WorkerRef(WorkerId("d"), Role.DECODE, Epoch(2), "loopback:d")
LAYOUT = KVLayout(model="toy", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
MAX_CONTEXT, VOCAB_SIZE = 1000, 100


def make_job(
    token_ids: tuple[int, ...],
    *,
    name: str = "r",
    max_tokens: int = 8,
    samples: tuple[SampleStart, ...] = (SampleStart(0),),
    decode: WorkerRef | None = DECODE,
    time_left_s: float = 100.0,
    prompt_logprobs: int | None = None,
) -> PrefillJob:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs)
    request = Request(RequestId(name), token_ids, sampling, num_samples=len(samples))
    return PrefillJob(request, samples, TicketId(name), decode, attempt=0, time_left_s=time_left_s)


def make_prompt(num_tokens: int, *, now: float = 0.0, name: str = "r", time_left_s: float = 100.0) -> Prompt:
    """A prompt whose tokens no other prompt shares a first block with, as long as names differ."""
    first = sum(name.encode()) % VOCAB_SIZE
    token_ids = tuple((first + 7 * index) % VOCAB_SIZE for index in range(num_tokens))
    return new_prompt(make_job(token_ids, name=name, time_left_s=time_left_s), MAX_CONTEXT, VOCAB_SIZE, now)


def make_cache(num_blocks: int) -> KVCache:
    return KVCache(KVPool(LAYOUT, num_blocks), BlockAllocator(num_blocks))
