"""What crosses the edge of a worker: PrefillJob, PrefillResult, GenerateJob, LendJob, WatchEvent, BlockPage.

The same values whether the call goes through gRPC or stays in one process. Immutable; no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.block_hash import BlockHash
from core.ids import NO_EPOCH, Epoch, RequestId, TicketId, WorkerRef
from core.request import Request, TokenDelta, TokenLogprob
from core.telemetry import StallCause
from core.worker_status import BlockEvent, BlockTier, WorkerStatus


@dataclass(frozen=True, slots=True)
class SampleStart:
    """One sample to run: its index and the output tokens that are already facts (never sampled again)."""

    sample_index: int
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Read a prompt, sample the next token of each sample, and hand the KV to `decode` under `ticket_id`.

    `decode` is None when nothing is to be handed over (`max_tokens` 0 or 1): then no offer is made. A
    resumed request has one sample whose `emitted` tokens are read like prompt; ticket length = prompt +
    emitted. `attempt` counts placements.
    """

    request: Request
    samples: tuple[SampleStart, ...]
    ticket_id: TicketId
    decode: WorkerRef | None
    attempt: int
    time_left_s: float


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """First tokens (one delta a sample, in the order of the job's samples) and what they cost.

    With `max_tokens` 0 the deltas carry no token and finish by length. `prompt_logprobs[i]` belongs to
    prompt token i + 1 (the first prompt token has none) and is empty unless asked for. Times in seconds:
    waiting for the first step; from then to the first token.
    """

    deltas: tuple[TokenDelta, ...]
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Continue (with `ticket_id`) or run from the start (without) the given samples on a decode worker.

    Each delta's `position` counts from the sample's own output start, so the first one has position
    `len(emitted)`. A job with the same request id and attempt attaches to the running one and replays; it
    never starts a second sequence.
    """

    request: Request
    samples: tuple[SampleStart, ...]
    ticket_id: TicketId | None
    attempt: int
    time_left_s: float


@dataclass(frozen=True, slots=True)
class LendJob:
    """Send to the prefill worker `to` what is cached here of a prompt whose full blocks are `block_hashes`.

    Blocks that `to` has already do not travel. It has them all cached when the job is done; they stay cached
    here, too. `ticket_id` names the transfer, and no other.
    """

    request_id: RequestId
    ticket_id: TicketId
    block_hashes: tuple[BlockHash, ...]
    to: WorkerRef
    time_left_s: float


@dataclass(frozen=True, slots=True)
class LendResult:
    """`num_tokens` of the prompt, from its first on, are cached at the borrower now; `num_sent_blocks`
    blocks travelled for that. 0 if nothing was cached here any more.
    """

    num_tokens: int
    num_sent_blocks: int


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Stop what this worker does for the request; unknown names are not an error.

    With `ticket_id` only what came or is to come under that ticket. `sample_index` narrows it to one sample
    of a Generate; a Prefill, which draws one token of each, goes on.
    """

    request_id: RequestId
    ticket_id: TicketId | None = None
    reason: str = "cancelled"
    sample_index: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a worker tells of its way to a token that it had to read for: durations by its own clock, seconds.

    `queue_s`: from the call to the first step that read; `compute_s`: from there to the token; `wait_s`: how
    long a Generate waited for its KV, which then came. `cause`: why a stream that had begun was read again.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    cause: StallCause | None = None


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """One message of a Generate stream:

    Tokens, or (once, when asked for and prefilled here) the prompt's logprobs. `reading` comes with the first
    tokens of a call and with those after a preemption.
    """

    delta: TokenDelta
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One message of a worker's Watch stream: a status, block events, or neither.

    `number` is the number of the last block event included; a receiver that sees a gap asks for pages of
    the set. `digest` is (count, XOR of the blocks' `digest_part`s) of the set after that event; it comes
    with each status, and alone at the start of a stream and where events were left out. `epoch`: of the
    worker's process. `age_s`: how long the oldest of the events has waited to be sent.
    """

    number: int
    status: WorkerStatus | None = None
    events: tuple[BlockEvent, ...] = ()
    digest: tuple[int, int] | None = None
    epoch: Epoch = NO_EPOCH
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """Tell the set of blocks, part by part (`core.block_hash.part_of`), from `first_part` on and up to
    `end_part` (exclusive) at most.

    `known`: digests of the parts from `first_part` on as the asker has them. Parts that fit are not told
    again, parts beyond are not known.
    """

    first_part: int
    end_part: int
    known: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockPage:
    """The set of blocks of the parts `first_part` up to `end_part` (exclusive), after event `number`.

    `changed`: the parts that are told anew, ascending; `hashes`: all their blocks, `tiers`: where those are
    (empty: all on the device). What is not in `changed` is as the asker knew it.
    """

    epoch: Epoch
    number: int
    first_part: int
    end_part: int
    changed: tuple[int, ...] = ()
    hashes: tuple[BlockHash, ...] = ()
    tiers: tuple[BlockTier, ...] = ()
