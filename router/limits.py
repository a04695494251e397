"""What router replicas and the owner of the limits say to each other, and what a replica asks of the owner.

Values and the Protocol only; the owner lives in `cluster`, the replica's side is `leases`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from core.ids import TenantId


class LimitKind(StrEnum):
    """What a tenant may have so much of."""

    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
    CONCURRENT_TOKENS = "concurrent_tokens"


@dataclass(frozen=True, slots=True)
class LimitName:
    tenant: TenantId
    kind: LimitKind


@dataclass(frozen=True, slots=True)
class Holding:
    """One replica's part of one limit: of `size` tokens in all it holds `num_held`, of which `num_free` are
    to spare, and wants `num_wanted` more, `num_asked` of them for calls that wait. `back_s`: how long after
    they are taken tokens come back (infinite: when the request ends).
    """

    name: LimitName
    size: int
    num_held: int
    num_free: int
    num_wanted: int
    num_asked: int
    back_s: float


@dataclass(frozen=True, slots=True)
class PromisedCall:
    """A refused call that is to come back in `due_in_s`. `call`: the same for the same call sent again;
    `scope`: what is kept for it, see `promises`.
    """

    scope: str
    call: int
    due_in_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """All holdings of a replica. `number` rises with each report, so that one that was late is known.
    `promised`: the calls for which it keeps something; `claims`: those that came to it, though another
    replica had told them to come back.
    """

    replica: str
    number: int
    holdings: tuple[Holding, ...]
    promised: tuple[PromisedCall, ...] = ()
    claims: tuple[PromisedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """The owner's answer for one limit: `num_granted` tokens more are the replica's; of its free ones it
    shall return `num_recalled`; `num_elsewhere` are free with the owner or the other replicas.
    """

    name: LimitName
    num_granted: int
    num_recalled: int
    num_elsewhere: int


@dataclass(frozen=True, slots=True)
class Orders:
    """`is_settled` False: the owner is new and has not heard of all replicas yet; it grants nothing.
    `promised`: what other replicas keep for calls that are to come back; `claimed`: those of this replica's
    that came to another one.
    """

    orders: tuple[Order, ...]
    num_replicas: int
    is_settled: bool
    promised: tuple[PromisedCall, ...] = ()
    claimed: tuple[PromisedCall, ...] = ()


class SoleOwner:
    """The owner for the only router there is: it may have everything."""

    async def exchange(self, report: Report) -> Orders:
        orders = (
            Order(
                holding.name,
                holding.num_wanted,
                0,
                holding.size - holding.num_held - holding.num_wanted,
            )
            for holding in report.holdings
        )
        return Orders(tuple(orders), num_replicas=1, is_settled=True)


class LimitOwner(Protocol):
    """Who hands the tokens of all limits out to the replicas."""

    async def exchange(self, report: Report) -> Orders:
        """Raises ConnectionError while the owner is away."""
        ...
