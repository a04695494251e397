"""TenantsConfig: the part `router.tenants` of the configuration: who may ask, and for how much.

Owns defaults and their limits; values only. Keys are here as hashes, never in plain text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MAX_PRIORITY = 9
NORMAL_PRIORITY = 5
ANY_TENANT = "*"

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have; None: no limit. `name` "*" stands for every tenant that is not listed.

    Rates are for any minute, over all router replicas: a token that is taken comes back a minute later.
    Output tokens are taken ahead (`max_tokens` × n) and what was not generated comes back at the end.
    `max_concurrent_tokens`: prompt and possible answer of all open requests together. `weight`: the share of
    the service among tenants that wait at the same priority. `max_priority`: the highest X-Priority that is
    honoured; a higher one is lowered to it. `kv_share`: the part of each worker's KV pool (above 0, at most
    1) that other tenants do not push this one's cached blocks out of; None: an equal part.
    """

    name: str
    weight: float = 1.0
    max_priority: int = NORMAL_PRIORITY
    max_requests_per_minute: int | None = None
    max_prompt_tokens_per_minute: int | None = None
    max_output_tokens_per_minute: int | None = None
    max_concurrent_tokens: int | None = None
    kv_share: float | None = None

    def __post_init__(self) -> None:
        if self.name != ANY_TENANT and not TENANT_NAME.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}, but must be up to 64 of A-Z a-z 0-9 . _ -, or *")
        if not 0 < self.weight < float("inf"):
            raise ValueError("weight must be above 0")
        if not 0 <= self.max_priority <= MAX_PRIORITY:
            raise ValueError(f"max_priority must be between 0 and {MAX_PRIORITY}")
        for name in (
            "max_requests_per_minute",
            "max_prompt_tokens_per_minute",
            "max_output_tokens_per_minute",
            "max_concurrent_tokens",
        ):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise ValueError("kv_share must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """API keys are asked for as soon as `keys_file` or `keys` is set; without them everybody is one tenant,
    `default`, and the service may listen on loopback only.

    `keys_file`: what `baton keys` writes; it is read again when it changes, on each node that runs a router.
    Limits that stand in it (`baton keys limit`) go before `limits`, tenant by tenant.
    `keys`: hashed keys as `baton keys hash` prints them, for the environment. `limits`: see TenantLimits.
    `share_prefixes`: cached prefixes are shared between tenants, who can then notice each other's prompts.
    `usage_file`: one line of JSON for each answered call, for billing; without any content.
    `aging_s`: who waits rises by one priority so often, so that none starves. `reload_s`: how often the keys
    file is looked at. `lease_s`: how often a replica squares its part of the limits with the others'.
    """

    keys_file: Path | None = None
    keys: tuple[str, ...] = ()
    limits: tuple[TenantLimits, ...] = ()
    share_prefixes: bool = False
    usage_file: Path | None = None
    aging_s: float = 10.0
    reload_s: float = 2.0
    lease_s: float = 0.25

    @property
    def are_keys_required(self) -> bool:
        return self.keys_file is not None or bool(self.keys)

    def limits_of(self, name: str) -> TenantLimits | None:
        """The limits listed for that tenant, or for any; None if there are none."""
        by_name = {limits.name: limits for limits in self.limits}
        return by_name.get(name) or by_name.get(ANY_TENANT)

    def __post_init__(self) -> None:
        names = [limits.name for limits in self.limits]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"limits name the tenant {name} twice")
        for name in ("aging_s", "reload_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        shares = sum(limits.kv_share or 0.0 for limits in self.limits)
        if shares > 1 + 1e-9:
            raise ValueError(f"the kv_share of all tenants come to {shares:g}, more than 1")
