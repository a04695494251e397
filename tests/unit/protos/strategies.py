"""Hypothesis strategies of the values that cross a process border."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from core.block_hash import NUM_PARTS, BlockHash, part_of
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    PrefillJob,
    PrefillResult,
    Reading,
    SampleStart,
    SnapshotJob,
    WatchEvent,
)
from core.kv_layout import DTYPE_BYTES, KVLayout
from core.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob
from core.telemetry import StallCause
from core.worker_status import BlockEvent, BlockEventKind, BlockTier, StepCost, WorkerStatus

# a lone surrogate is no UTF-8 and cannot be put into a protobuf string
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(bool)
counts = st.integers(0, 2**31 - 1)
doubles = st.floats(allow_nan=False)
seconds = st.floats(min_value=0, max_value=1e6)
singles = st.floats(width=32, allow_nan=False)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
epochs = st.integers(0, 2**64 - 1).map(Epoch)
hashes = st.binary(min_size=16, max_size=16).filter(any).map(BlockHash)
ticket_ids = st.binary(min_size=16, max_size=16).map(lambda raw: TicketId(raw.hex()))
candidates = st.lists(st.tuples(counts, singles), max_size=4).map(tuple)

worker_refs = st.builds(WorkerRef, texts.map(WorkerId), st.sampled_from(Role), epochs, texts)
samplings = st.builds(
    SamplingParams,
    max_tokens=counts,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=doubles,
    top_p=doubles,
    top_k=counts,
    min_p=doubles,
    repetition_penalty=doubles,
    presence_penalty=doubles,
    frequency_penalty=doubles,
    logit_bias=candidates,
    min_tokens=counts,
    ignore_eos=st.booleans(),
    stop_token_ids=token_ids,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    request_id=names.map(RequestId),
    prompt_token_ids=token_ids,
    sampling=samplings,
    model=texts,
    adapter=texts,
    num_samples=st.integers(1, 8),
    cache_salt=texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    is_prefix_cache_read=st.booleans(),
)


@st.composite
def requests_with_samples(draw: st.DrawFn) -> tuple[Request, tuple[SampleStart, ...]]:
    request = draw(requests)
    indexes = draw(st.lists(st.integers(0, request.num_samples - 1), min_size=1, unique=True))
    return request, tuple(SampleStart(index, draw(token_ids)) for index in indexes)


@st.composite
def prefill_jobs(draw: st.DrawFn) -> PrefillJob:
    request, samples = draw(requests_with_samples())
    decode = draw(st.none() | worker_refs)
    return PrefillJob(request, samples, draw(ticket_ids), decode, draw(counts), draw(seconds))


@st.composite
def generate_jobs(draw: st.DrawFn) -> GenerateJob:
    request, samples = draw(requests_with_samples())
    return GenerateJob(request, samples, draw(st.none() | ticket_ids), draw(counts), draw(seconds))


logprobs = st.lists(st.builds(TokenLogprob, counts, singles, candidates), max_size=4).map(tuple)
deltas = st.builds(
    TokenDelta,
    sample_index=st.integers(0, 100),
    position=counts,
    token_ids=token_ids,
    logprobs=logprobs,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    num_cached_tokens=counts,
)
prefill_results = st.builds(
    PrefillResult, st.lists(deltas, max_size=3).map(tuple), counts, doubles, doubles, logprobs
)
seconds = st.floats(0.0, 1e6, allow_nan=False)
readings = st.builds(Reading, seconds, seconds, seconds, st.none() | st.sampled_from(StallCause))
generate_events = st.builds(GenerateEvent, deltas, logprobs, st.none() | readings)
lend_jobs = st.builds(
    LendJob, texts.map(RequestId), ticket_ids, st.lists(hashes, max_size=4).map(tuple), worker_refs, seconds
)
cancel_jobs = st.builds(
    CancelJob,
    texts.map(RequestId),
    st.none() | ticket_ids,
    texts,
    st.none() | st.integers(min_value=0, max_value=2**31 - 1),
)

step_costs = st.builds(StepCost, seconds, seconds, seconds, seconds, seconds, seconds)
statuses = st.builds(
    WorkerStatus,
    ref=worker_refs,
    is_draining=st.booleans(),
    num_waiting=counts,
    num_running=counts,
    num_waiting_tokens=counts,
    num_running_tokens=counts,
    num_blocks=counts,
    num_free_blocks=counts,
    num_cached_blocks=counts,
    num_held_blocks=counts,
    num_quarantined_blocks=counts,
    max_num_seqs=counts,
    prefill_tokens_per_s=doubles,
    step_s=doubles,
    num_shared_cores=counts,
    max_step_tokens=counts,
    max_chunk_tokens=counts,
    alone=step_costs,
    beside=step_costs,
)
tiers = st.sampled_from(BlockTier)
block_events = st.one_of(
    st.builds(BlockEvent, st.just(BlockEventKind.STORED), hashes, st.none() | hashes, tiers),
    st.builds(BlockEvent, st.just(BlockEventKind.REMOVED), hashes),
    st.just(BlockEvent(BlockEventKind.CLEARED)),
)
parts = st.tuples(st.integers(0, NUM_PARTS - 1), st.integers(1, NUM_PARTS)).filter(
    lambda pair: pair[0] < pair[1]
)
snapshot_jobs = st.builds(
    lambda pair, known: SnapshotJob(*pair, tuple(known[: pair[1] - pair[0]])),
    parts,
    st.lists(st.integers(0, 2**64 - 1), max_size=5),
)
block_pages = st.lists(st.tuples(hashes, tiers), max_size=5).flatmap(
    lambda blocks: st.builds(
        BlockPage,
        epochs,
        counts,
        st.just(0),
        st.just(NUM_PARTS),
        st.just(tuple(sorted({part_of(block_hash) for block_hash, _ in blocks}))),
        st.just(tuple(block_hash for block_hash, _ in blocks)),
        st.just(tuple(tier for _, tier in blocks)),
    )
)
digests = st.tuples(st.integers(0, 2**32), st.integers(0, 2**64 - 1))
ages = st.floats(0.0, 1e6)
watch_events = st.one_of(
    st.builds(WatchEvent, counts, status=statuses, digest=digests, epoch=epochs),
    st.builds(
        WatchEvent,
        counts.map(lambda number: number + 5),
        events=st.lists(block_events, min_size=1, max_size=5).map(tuple),
        epoch=epochs,
        age_s=ages,
    ),
    st.builds(WatchEvent, counts, digest=digests, epoch=epochs),
)

layouts = st.builds(
    KVLayout,
    model=texts,
    num_layers=st.integers(1, 100),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    block_size=st.integers(1, 128),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    scales=texts,
)


@st.composite
def tickets(draw: st.DrawFn) -> HandoffTicket:
    layout = draw(layouts)
    num_tokens = draw(st.integers(1, 5 * layout.block_size))
    num_full = num_tokens // layout.block_size
    return HandoffTicket(
        ticket_id=draw(ticket_ids),
        request_id=RequestId(draw(texts)),
        prefill=draw(worker_refs),
        decode=draw(worker_refs),
        layout=layout,
        num_tokens=num_tokens,
        block_hashes=tuple(draw(st.lists(hashes, min_size=num_full, max_size=num_full))),
        num_samples=draw(st.integers(1, 8)),
        num_growth_tokens=draw(counts),
        is_prefix_cache_read=draw(st.booleans()),
    )


# a busy machine is no failure
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
