"""Caches, requests and tickets for the tests of this folder."""

from __future__ import annotations

from core.block_hash import hash_blocks
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from core.jobs import GenerateJob, SampleStart
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool

PREFILL = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "loopback:p")
DECODE = WorkerRef(WorkerId("d"), Role.DECODE, Epoch(2), "loopback:d")
LAYOUT = KVLayout(model="toy", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
MAX_CONTEXT = 1000


def make_cache(num_blocks: int) -> KVCache:
    return KVCache(KVPool(LAYOUT, num_blocks), BlockAllocator(num_blocks))


def make_request(
    num_tokens: int,
    name: str = "r",
    *,
    max_tokens: int = 8,
    first: int = 0,
    num_samples: int = 1,
    **sampling: object,
) -> Request:
    """A prompt of consecutive token ids from `first` on, so that those with the same `first` share a
    prefix.
    """
    params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)  # type: ignore[arg-type]
    return Request(RequestId(name), tuple(range(first, first + num_tokens)), params, num_samples=num_samples)


def make_job(
    request: Request,
    *,
    emitted: tuple[int, ...] = (),
    ticket_id: str | None = None,
    attempt: int = 0,
    time_left_s: float = 100.0,
) -> GenerateJob:
    samples = tuple(SampleStart(index, emitted) for index in range(request.num_samples))
    ticket = TicketId(ticket_id) if ticket_id is not None else None
    return GenerateJob(request, samples, ticket, attempt, time_left_s)


def make_ticket(
    cache: KVCache,
    request: Request,
    ticket_id: str = "t",
    *,
    num_growth_tokens: int = 4,
    layout: KVLayout = LAYOUT,
) -> HandoffTicket:
    """What prefill would offer for the request's prompt."""
    root = cache.hash_root(request)
    return HandoffTicket(
        ticket_id=TicketId(ticket_id),
        request_id=request.request_id,
        prefill=PREFILL,
        decode=DECODE,
        layout=layout,
        num_tokens=request.num_prompt_tokens,
        block_hashes=tuple(hash_blocks(root, request.prompt_token_ids, LAYOUT.block_size)),
        num_samples=request.num_samples,
        num_growth_tokens=num_growth_tokens,
        is_prefix_cache_read=request.is_prefix_cache_read,
    )


def payload(num_blocks: int, value: int = 7) -> bytes:
    """Bytes of as many blocks."""
    return bytes([value]) * (num_blocks * LAYOUT.block_bytes)
