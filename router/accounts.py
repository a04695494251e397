"""Accounts: what one call takes of its tenant's limits, and what is written down of it in the end.

Owns that each call that was begun is settled and metered exactly once, whatever way it ended. Lives on the
event loop.
"""

from __future__ import annotations

import time

from core.clock import Clock
from router.answering import Answering, Usage
from router.config import RouterConfig
from router.leases import Leases
from router.metrics import Outcome, RouterMetrics
from router.quotas import CallCost, Grant, Quotas
from router.rate_headers import rate_headers
from router.tenant_metrics import TenantMetrics
from router.tenants import Caller
from router.usage_log import UsageLog

_NOTHING = Usage(0, 0, 0)


class Accounts:
    """One per router. `start` before use, `stop` at the end."""

    def __init__(
        self, config: RouterConfig, model: str, leases: Leases, metrics: RouterMetrics, clock: Clock
    ) -> None:
        self.model = model
        self.clock = clock
        self.quotas = Quotas(leases, clock)
        self.metrics = TenantMetrics(metrics.registry, leases, clock)
        path = config.tenants.usage_file
        self.log = None if path is None else UsageLog(path, self.metrics.usage_lost)

    def open(self, caller: Caller, call_id: str, endpoint: str) -> Account:
        """The account of one call."""
        return Account(self, caller, call_id, endpoint)

    def stop(self) -> None:
        """Write what waits; blocks until it is written."""
        if self.log is not None:
            self.log.close()


class Account:
    """One call's. `answering` is set once there is an answer under way."""

    def __init__(self, accounts: Accounts, caller: Caller, call_id: str, endpoint: str) -> None:
        self.answering: Answering | None = None
        self._accounts = accounts
        self._caller = caller
        self._call_id = call_id
        self._endpoint = endpoint
        self._grant = Grant()
        self._is_closed = False

    async def admit(self, cost: CallCost) -> None:
        """Take what the call may need. Raises QuotaExceeded or InvalidRequest."""
        self._grant = await self._accounts.quotas.admit(self._caller.tenant, cost)

    def rate_headers(self) -> dict[str, str]:
        """What the tenant has left."""
        leases = self._accounts.quotas.leases_of(self._caller.tenant)
        return rate_headers(leases, self._accounts.clock.now())

    def close(self, outcome: Outcome, reason: str, seconds: float) -> None:
        """The call has ended: give back, count, write down. Without effect the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        usage = self.answering.usage() if self.answering is not None else _NOTHING
        is_served = usage.num_completion_tokens > 0 or outcome is Outcome.SUCCEEDED
        self._grant.settle(usage.num_completion_tokens, is_served, self._accounts.clock.now())
        tenant = self._caller.tenant.tenant_id
        self._accounts.metrics.ended(tenant, outcome, reason)
        if not is_served:
            return
        self._accounts.metrics.used(tenant, usage)
        if self._accounts.log is not None:
            self._accounts.log.note(
                {
                    "time": round(time.time(), 3),
                    "tenant": tenant,
                    "key": self._caller.key_id,
                    "call": self._call_id,
                    "model": self._accounts.model,
                    "endpoint": self._endpoint,
                    "prompt_tokens": usage.num_prompt_tokens,
                    "cached_tokens": usage.num_cached_tokens,
                    "output_tokens": usage.num_completion_tokens,
                    "outcome": outcome.value,
                    "reason": reason,
                    "seconds": round(seconds, 3),
                }
            )
