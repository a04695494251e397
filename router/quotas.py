"""Quotas: whether a tenant's call fits its limits now, and if not, when.

Owns what a call takes from the buckets (a request, its prompt, its longest possible answer) and that what was
not used is given back. The parts of the limits over several routers are `leases`' business. Lives on the
event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import InvalidRequest, QuotaExceeded
from core.ids import TenantId
from router.bookings import Bookings
from router.buckets import Take
from router.leases import Lease, Leases
from router.limits import LimitKind, LimitName
from router.tenants import Tenant
from router.tenants_config import TenantLimits

# how long a call waits for tokens that are free with another router, and one that was told to come by now
_REFILL_S = 0.8
_EXPECTED_REFILL_S = 1.5
_OPEN_STEP = 0.2
# clients that were told to come back do so up to so much later
_LATE_S = 1.5
# another router may think a call due so much sooner (see `promises`)
_ON_ITS_WAY_S = 0.6
# the others' tokens mostly come back sooner, when a request ends
_KNOWN_RETURNS = frozenset({LimitKind.REQUESTS, LimitKind.PROMPT_TOKENS})
_WORDS = {
    LimitKind.REQUESTS: "requests per minute",
    LimitKind.PROMPT_TOKENS: "prompt tokens per minute",
    LimitKind.OUTPUT_TOKENS: "output tokens per minute",
    LimitKind.CONCURRENT_TOKENS: "tokens in open requests at a time",
}


@dataclass(frozen=True, slots=True)
class CallCost:
    """What a call may take at most. `call`: the same for the same call sent again."""

    num_prompt_tokens: int
    max_output_tokens: int
    call: int

    def of(self, kind: LimitKind) -> int:
        match kind:
            case LimitKind.REQUESTS:
                return 1
            case LimitKind.PROMPT_TOKENS:
                return self.num_prompt_tokens
            case LimitKind.OUTPUT_TOKENS:
                return self.max_output_tokens
            case LimitKind.CONCURRENT_TOKENS:
                return self.num_prompt_tokens + self.max_output_tokens


@dataclass(eq=False, slots=True)
class _Account:
    """A tenant's leases and what its refused calls were told."""

    limits: TenantLimits
    leases: dict[LimitKind, Lease] = field(default_factory=dict)
    sizes: dict[LimitKind, int] = field(default_factory=dict)
    bookings: Bookings[LimitKind] = field(default_factory=Bookings)
    mean_open_s: float = 2.0
    last_due_at: float = 0.0

    def note_promises(self) -> None:
        for kind in _KNOWN_RETURNS & self.leases.keys():
            self.leases[kind].num_promised = self.bookings.num_kept(kind)

    def due_by(self, at: float) -> Iterator[tuple[int, float]]:
        return self.bookings.due_by(at)

    def hand_over(self, call: int, now: float) -> None:
        """A call that was refused here came to another router: what was kept for it goes there."""
        if not self.bookings.is_due(call, now + _ON_ITS_WAY_S):
            return
        for kind, amount in self.bookings.costs_of(call).items():
            self.leases[kind].hand_over(amount, now)
        self.bookings.claim(call)
        self.note_promises()


@dataclass(eq=False, slots=True)
class Grant:
    """What a call has taken; `settle` once, when it has ended."""

    account: _Account | None = None
    taken_at: float = 0.0
    takes: Mapping[LimitKind, tuple[Lease, Take]] = field(default_factory=dict)

    def settle(self, num_output_tokens: int, is_served: bool, now: float) -> None:
        """Give back the answer's tokens that were not generated, and everything that is only for as long as
        the call is open. A call that got nothing gets everything back.
        """
        for kind, (lease, take) in self.takes.items():
            used = num_output_tokens if kind is LimitKind.OUTPUT_TOKENS else take.amount
            if kind is LimitKind.CONCURRENT_TOKENS or not is_served:
                used = 0
            lease.bucket.give_back(take, max(0, take.amount - used))
        self.takes = {}
        if self.account is not None and is_served:
            self.account.mean_open_s += _OPEN_STEP * (now - self.taken_at - self.account.mean_open_s)


class Quotas:
    """One per router."""

    def __init__(self, leases: Leases, clock: Clock) -> None:
        self._leases = leases
        self._clock = clock
        self._accounts: dict[TenantId, _Account] = {}

    def check(self, tenant: Tenant, cost: CallCost) -> None:
        """Raises InvalidRequest for a call that no waiting would ever let in."""
        for kind, size in _sizes(tenant.limits).items():
            if cost.of(kind) > size:
                what = f"the request may take {cost.of(kind)}, the tenant's limit is {size} {_WORDS[kind]}"
                param = "prompt" if kind is LimitKind.PROMPT_TOKENS else "max_tokens"
                raise InvalidRequest(what, param=param)

    async def admit(self, tenant: Tenant, cost: CallCost) -> Grant:
        """Take what the call may need. Raises QuotaExceeded with the seconds to wait, or InvalidRequest."""
        account = self._account(tenant)
        if not account.leases:
            return Grant()
        self.check(tenant, cost)
        needs = {lease: cost.of(kind) for kind, lease in account.leases.items()}
        is_due = account.bookings.is_due(cost.call, self._clock.now())
        # also where there is room for a newcomer: the other router is to know that it did come
        is_expected = is_due or self._leases.try_claim(tenant.tenant_id, cost.call, needs)
        grant = self._try_take(account, cost, is_expected)
        if grant is None:
            patience_s = _EXPECTED_REFILL_S if is_expected else _REFILL_S
            await self._leases.until_free(needs, patience_s, is_expected)
            # whatever became of the wait: what others gave back, or other limits, may let it in by now
            grant = self._try_take(account, cost, is_expected)
        if grant is None:
            raise self._refusal(account, cost)
        return grant

    def leases_of(self, tenant: Tenant) -> Mapping[LimitKind, Lease]:
        return self._account(tenant).leases

    def _account(self, tenant: Tenant) -> _Account:
        known = self._accounts.get(tenant.tenant_id)
        if known is None:
            known = self._accounts[tenant.tenant_id] = _Account(tenant.limits)
            self._leases.promises.watch(tenant.tenant_id, known)
        elif known.limits == tenant.limits:
            return known
        known.limits, known.sizes = tenant.limits, _sizes(tenant.limits)
        known.leases = {
            kind: self._leases.lease(LimitName(tenant.tenant_id, kind), size)
            for kind, size in known.sizes.items()
        }
        # what was promised under other limits may not be there to keep
        known.bookings, known.last_due_at = Bookings(), 0.0
        known.note_promises()
        return known

    def _try_take(self, account: _Account, cost: CallCost, is_expected: bool) -> Grant | None:
        """All or nothing. Newcomers, who are not expected, leave what is kept for others."""
        now = self._clock.now()
        for kind, lease in account.leases.items():
            kept = [] if is_expected else account.bookings.kept(kind, now)
            if kind not in _KNOWN_RETURNS:
                kept = [promise for promise in kept if promise[0] <= now]
            if not lease.bucket.can_spare(cost.of(kind), kept, now):
                return None
        takes: dict[LimitKind, tuple[Lease, Take]] = {}
        for kind, lease in account.leases.items():
            take = lease.bucket.try_take(cost.of(kind), now)
            assert take is not None
            lease.used_at = now
            takes[kind] = (lease, take)
        if account.bookings.is_due(cost.call, now):
            account.bookings.claim(cost.call)
        account.note_promises()
        return Grant(account, now, takes)

    def _refusal(self, account: _Account, cost: CallCost) -> QuotaExceeded:
        """Says when there will be room behind those that were refused before, and books that moment."""
        now = self._clock.now()
        bookings = account.bookings
        if bookings.is_due(cost.call, now):
            bookings.postpone(cost.call)
        wait_s, scarce = 0.0, next(iter(account.leases))
        for kind, lease in account.leases.items():
            kind_wait_s = _wait_s(lease, cost.of(kind) + bookings.ahead(kind), now, account.mean_open_s)
            if kind_wait_s > wait_s:
                wait_s, scarce = kind_wait_s, kind
        retry_after_s = max(1, math.ceil(max(wait_s, account.last_due_at - now)))
        account.last_due_at = now + retry_after_s
        costs = {kind: cost.of(kind) for kind in account.leases}
        bookings.book(cost.call, costs, account.last_due_at, account.sizes)
        account.note_promises()
        return QuotaExceeded(
            f"the tenant's limit of {account.leases[scarce].size} {_WORDS[scarce]} is reached; "
            f"try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
            limit=scarce.value,
        )


def _wait_s(lease: Lease, amount: int, now: float, mean_open_s: float) -> float:
    """Until so much is free here, if this router holds any. What comes back when requests end does so evenly
    in the time that a request is open. What is free elsewhere comes with one of the next rounds.
    """
    if lease.num_elsewhere >= amount:
        return 0.0
    if math.isfinite(lease.bucket.period_s):
        wait_s = lease.bucket.wait_s(amount, now, _LATE_S)
        return wait_s if math.isfinite(wait_s) else lease.bucket.period_s
    missing = amount - lease.bucket.num_free(now)
    return mean_open_s * max(0, missing) / max(1, lease.bucket.held)


def _sizes(limits: TenantLimits) -> dict[LimitKind, int]:
    sizes = {
        LimitKind.REQUESTS: limits.max_requests_per_minute,
        LimitKind.PROMPT_TOKENS: limits.max_prompt_tokens_per_minute,
        LimitKind.OUTPUT_TOKENS: limits.max_output_tokens_per_minute,
        LimitKind.CONCURRENT_TOKENS: limits.max_concurrent_tokens,
    }
    return {kind: size for kind, size in sizes.items() if size is not None}
