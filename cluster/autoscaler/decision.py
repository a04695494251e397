"""Decision and State: what comes out of a decision, and what the next one has to know of it.

Values only; every one of them can be written as JSON and read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.autoscaler.need import Measured, Need
from cluster.autoscaler.patience import Patience
from core.ids import Role


class Rule(StrEnum):
    """Why a pool's number is what it is. HOLD: it suits the need, or patience is not at its end. GROW and
    SHRINK: the need has lasted. WAKE: from zero, at once; SLEEP: nothing was asked for long. BOUND: the pool
    may not have what it needs, BUDGET: both may not. FLIP: a change of roles comes first. UNKNOWN: nobody
    says what is needed.
    """

    HOLD = "hold"
    GROW = "grow"
    SHRINK = "shrink"
    WAKE = "wake"
    SLEEP = "sleep"
    BOUND = "bound"
    BUDGET = "budget"
    FLIP = "flip"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker is to run the phase `role` from now on."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """`num_replicas` is wanted of Serve. `need` and `quick_need`: for demand a replica's start ahead, and for
    now.
    """

    num_replicas: int
    rule: Rule
    need: Need
    quick_need: Need


@dataclass(frozen=True, slots=True)
class PoolState:
    """What lasted how long: `slow` for replicas, which take a while to start, `quick` for changes of role."""

    slow: Patience = field(default_factory=Patience)
    quick: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """`flip` was ordered of a worker of the pool `home`. `at`: then, or when the worker was last seen to
    drain for it, or, once it `is_done`, when the worker was first seen in its role.
    """

    flip: Flip
    home: Role
    at: float
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Between two decisions. `busy_at`: when somebody last asked for something, or the start. `flips`: those
    under way, and those that are not to be taken back yet; one for each worker.
    """

    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    measured: Measured = field(default_factory=Measured)
    busy_at: float | None = None
    flips: tuple[FlipOrder, ...] = ()

    def pool(self, role: Role) -> PoolState:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Decision:
    """What is wanted of both pools, and whose role is to change, in this order: flips, then replicas."""

    prefill: PoolDecision
    decode: PoolDecision
    flips: tuple[Flip, ...] = ()

    def pool(self, role: Role) -> PoolDecision:
        return self.prefill if role is Role.PREFILL else self.decode
