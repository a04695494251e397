"""A small cache whose KV tells which token wrote it, and sequences on it. Owns no assertion."""

from __future__ import annotations

import zlib

from core.ids import RequestId
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from engine.sequence import Sequence, new_sequence

BLOCK_SIZE = 4
LAYOUT = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE)


def new_cache(num_blocks: int, enable_prefix_cache: bool = True) -> KVCache:
    return KVCache(KVPool(LAYOUT, num_blocks), BlockAllocator(num_blocks), enable_prefix_cache)


def request(
    prompt: tuple[int, ...], salt: str = "", is_read: bool = True, prompt_logprobs: int | None = None
) -> Request:
    return Request(
        RequestId("r"),
        prompt,
        SamplingParams(max_tokens=100, seed=1, prompt_logprobs=prompt_logprobs),
        cache_salt=salt,
        is_prefix_cache_read=is_read,
    )


def sequence_of(prompt: tuple[int, ...], **options: object) -> Sequence:
    return new_sequence(request(prompt, **options), 0, (), 1000)  # type: ignore[arg-type]


def content(sequence: Sequence, position: int) -> float:
    """A stand-in for the KV of a token: depends on salt and all tokens up to it, as attention makes it."""
    text = repr((sequence.request.cache_salt, sequence.token_ids[: position + 1]))
    return float(zlib.crc32(text.encode()) % (1 << 20))


def compute(cache: KVCache, sequence: Sequence, num_tokens: int) -> None:
    """What a step does: write the KV of the next tokens, count them, publish."""
    for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens):
        block_id = sequence.block_table[position // BLOCK_SIZE]
        assert cache.allocator.is_writable(block_id), "a step would write to a block that others may read"
        cache.pool.tensor[:, :, block_id, :, position % BLOCK_SIZE] = content(sequence, position)
    sequence.num_computed_tokens += num_tokens
    cache.publish_full(sequence)


def stored(cache: KVCache, sequence: Sequence) -> list[float]:
    return [
        cache.pool.tensor[0, 0, sequence.block_table[i // BLOCK_SIZE], 0, i % BLOCK_SIZE, 0].item()
        for i in range(sequence.num_computed_tokens)
    ]


def expected(sequence: Sequence) -> list[float]:
    return [content(sequence, i) for i in range(sequence.num_computed_tokens)]


def finished(cache: KVCache, prompt: tuple[int, ...], **options: object) -> None:
    """Run a prompt to its end, so that its blocks are cached."""
    sequence = sequence_of(prompt, **options)
    assert cache.try_start(sequence)
    compute(cache, sequence, sequence.num_uncomputed_tokens)
    cache.release(sequence)
