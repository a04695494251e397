"""What placement speaks of: Demand, Candidate, Decision, Plan. Values only, shared by all policies."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from core.ids import WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.worker_status import WorkerStatus
from router.speeds import Handoff, Speeds


class Plan(StrEnum):
    """`REMOTE`: P reads, D continues. `LOCAL`: D does both. `PREFILL_ONLY`: P's one token is the whole
    answer. `WAIT`: not yet; a worker that will have room soon is cheaper than any that has some now.
    """

    REMOTE = "remote"
    LOCAL = "local"
    PREFILL_ONLY = "prefill_only"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed. `num_tokens` is prompt plus emitted tokens; `is_ended_by_prefill`: at most
    one token is wanted. `num_output_tokens`: how long each sample is expected to go on. `can_wait`: it may
    be held back until a worker has room. `waited_ms`: since it came, as long as a target for its
    first token matters (None: it has been sent, or the deadline is near).
    """

    num_tokens: int
    num_samples: int = 1
    is_ended_by_prefill: bool = False
    num_output_tokens: int = 32
    can_wait: bool = True
    waited_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as placement sees it. `num_cached_tokens`: prefix it will hold by when it begins to read;
    `num_told_tokens`: prefix that it has told it holds now.

    `num_ahead_tokens`, `num_ahead_pairs`: prompt tokens that it computes first, and the pairs of one of them
    and one before it. `num_streams`: sequences that get a token each step; `num_kv_tokens`: KV that requests
    hold; `num_active`: the streams and those that wait for it to read them; `num_seqs`: all that have a place
    or wait for one. `num_pending_blocks`: taken since its status.
    `pace`: how much longer reading takes there than its speeds say. `handoffs`: what KV costs from there to
    a decode worker. `is_handoff_target`: whether KV may be sent to it (a decode worker whose transfers just
    failed may still prefill).
    """

    ref: WorkerRef
    layout: KVLayout
    status: WorkerStatus | None = None
    node: str = ""
    zone: str = ""
    speeds: Speeds | None = None
    pace: float = 1.0
    handoffs: Mapping[WorkerId, Handoff] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_told_tokens: int = 0
    num_ahead_tokens: int = 0
    num_ahead_pairs: float = 0.0
    num_kv_tokens: int = 0
    num_streams: int = 0
    num_active: int = 0
    num_seqs: int = 0
    num_pending_blocks: int = 0
    is_handoff_target: bool = True

    @property
    def is_busy(self) -> bool:
        """Whether it computes at present."""
        return self.num_active > 0 or self.num_streams > 0 or self.num_ahead_tokens > 0

    @property
    def shares_cores(self) -> bool:
        """Whether other workers of its node make it slower, and it them."""
        return self.status is not None and self.status.num_shared_cores > 0

    def has_room(self, demand: Demand) -> bool:
        """Whether the demand's samples have places and blocks there now, beside all that was placed."""
        status = self.status
        if status is None:
            return True
        if self.num_seqs + demand.num_samples > status.max_num_seqs:
            return False
        num_missing = max(0, demand.num_tokens - self.num_cached_tokens)
        num_needed = self.layout.num_blocks(num_missing) + demand.num_samples
        return num_needed + self.num_pending_blocks <= status.num_free_blocks + status.num_cached_blocks


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why: the terms, in milliseconds, add up to `cost_ms`. A policy that knows no
    costs gives no terms. `others`: the best of each other plan that was possible. `pull_from`: a decode
    worker that first sends `prefill` what it has cached of the prompt and `prefill` has not.
    """

    plan: Plan
    prefill: Candidate | None
    decode: Candidate | None
    terms: dict[str, float] = field(default_factory=dict)
    others: tuple[Decision, ...] = ()
    pull_from: Candidate | None = None
    gives_way: bool = False

    @property
    def cost_ms(self) -> float:
        return sum(self.terms.values())

    @property
    def reader(self) -> Candidate:
        """The worker that reads the prompt."""
        found = self.prefill or self.decode
        assert found is not None
        return found

    @property
    def num_cached_tokens(self) -> int:
        """What of the prompt the reader will not have to read."""
        pulled = 0 if self.pull_from is None else self.pull_from.num_told_tokens
        return max(self.reader.num_cached_tokens, pulled)


@dataclass(slots=True)
class Draw:
    """What a policy may not make up by itself: chance, and the number of this placement."""

    chance: random.Random
    turn: int = 0
