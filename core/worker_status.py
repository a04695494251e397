"""What a worker says of itself: Announcement (membership), WorkerStatus (load), BlockEvent (its blocks).

Values only; `kv_transfer.feed` numbers the events, the router's `worker_table` and `prefix_index` consume
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from core.block_hash import BlockHash
from core.ids import NO_EPOCH, Epoch, Role, WorkerRef
from core.kv_layout import KVLayout
from core.pair_status import PairStatus
from core.role_change import RoleCause


@dataclass(frozen=True, slots=True)
class Announcement:
    """A worker's line in the registry, repeated every second. `num_blocks`: the size of its KV pool.

    `home_role` is the one that its process started with (None: that of `ref`), `cause` why it has another one
    at present. `process_epoch` outlives a change of role and numbers the block events (0: that of `ref`).
    `zone`: the part of the cluster that its node is in, within which the network is fast.
    """

    ref: WorkerRef
    model: str
    layout: KVLayout
    max_context: int
    pid: int
    node: str
    home_pool: str
    num_blocks: int
    home_role: Role | None = None
    cause: RoleCause | None = None
    process_epoch: Epoch = NO_EPOCH
    zone: str = ""

    @property
    def home(self) -> Role:
        return self.home_role or self.ref.role

    @property
    def block_epoch(self) -> Epoch:
        """Under which its Watch numbers block events."""
        return self.process_epoch or self.ref.epoch

    @property
    def is_stand_in(self) -> bool:
        """Whether it fills an empty pool until that is back."""
        return self.cause is RoleCause.EMPTY_POOL and self.home is not self.ref.role


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, as measured: `decode_s + streams × stream_s + their KV tokens × kv_s`; with tokens
    of prompts in it `prefill_s + tokens × token_s + pairs × pair_s` and what the streams add. A pair is a
    prompt token and one before it that it attends to. All 0: not measured yet.
    """

    decode_s: float = 0.0
    stream_s: float = 0.0
    prefill_s: float = 0.0
    token_s: float = 0.0
    kv_s: float = 0.0
    pair_s: float = 0.0


def num_pairs(num_tokens: int, num_before: int) -> float:
    """How many pairs attend when `num_tokens` are read behind `num_before`."""
    return num_tokens * (num_before + 0.5 * num_tokens)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Load at one moment. Token counts are uncached tokens still to be computed; blocks partition the pool.

    `prefill_tokens_per_s` and `step_s` are measured running averages (0 = not measured yet).

    `alone` and `beside` are what steps cost with the host's cores to itself and beside another worker of the
    host. `num_shared_cores`: cores that it shares with others there, 0 if its speed does not depend on them.
    `max_step_tokens`: prompt tokens of a step without streams, `max_chunk_tokens`: beside some (0: as many).
    `pairs`: the workers that it hands KV to.
    """

    ref: WorkerRef
    is_draining: bool
    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_running_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_quarantined_blocks: int
    max_num_seqs: int
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    num_shared_cores: int = 0
    max_step_tokens: int = 0
    max_chunk_tokens: int = 0
    alone: StepCost = StepCost()
    beside: StepCost = StepCost()
    pairs: tuple[PairStatus, ...] = ()

    @property
    def kv_utilization(self) -> float:
        """Share of the pool that requests hold; evictable cached blocks count as free."""
        return (self.num_held_blocks + self.num_quarantined_blocks) / max(1, self.num_blocks)


class BlockEventKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class BlockTier(IntEnum):
    """Where a block's best copy lives, the nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A change of the *set* of hashes that a worker holds:

    First copy stored, last copy removed, all cleared. A block that is stored again in another `tier` has
    moved. `parent` is None for a first block.
    """

    kind: BlockEventKind
    block_hash: BlockHash | None = None
    parent: BlockHash | None = None
    tier: BlockTier = BlockTier.DEVICE
