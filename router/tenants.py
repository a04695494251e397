"""Tenants: whose request it is, and what that tenant may have.

Owns the way from an Authorization header to a tenant, the reload of keys and limits, and the salt that
keeps a tenant's cached prefixes apart. Does not count anything (see `quotas`). Lives on the event loop; the
keys file is read on another thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from core.errors import Forbidden, InvalidConfig, Unauthorized
from core.ids import DEFAULT_TENANT, TenantId
from router.api_keys import KeyEntry, KeyRing, KeyScope, entry_from_text
from router.key_file import KeyFile, Stamp, read_key_file, stamp_of
from router.own_page import refuse_foreign_pages
from router.tenants_config import MAX_PRIORITY, TenantLimits, TenantsConfig
from router.worker_table import Sleep

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays. `cache_salt` is hashed into the name of each of its KV blocks."""

    tenant_id: TenantId
    limits: TenantLimits
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of one call, and the public name of its key ("" where keys are not asked for)."""

    tenant: Tenant
    key_id: str = ""
    is_operator: bool = False


class Tenants:
    """One per router. Raises InvalidConfig at once if the configured keys cannot be used."""

    def __init__(self, config: TenantsConfig, sleep: Sleep = asyncio.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._given = tuple(
            entry_from_text(text, f"router.tenants.keys[{index}]") for index, text in enumerate(config.keys)
        )
        self._stamp: Stamp | None = None
        self._trouble: str | None = None
        self._ring = KeyRing(self._given)
        self._file: KeyFile | None = None
        self._tenants: dict[TenantId, Tenant] = {}
        if config.keys_file is not None:
            self._stamp = stamp_of(config.keys_file)
            self._use(read_key_file(config.keys_file))

    @property
    def are_keys_required(self) -> bool:
        return self._config.are_keys_required

    def caller(self, authorization: str | None) -> Caller:
        """Who sends that header. Raises Unauthorized."""
        if not self.are_keys_required:
            return Caller(self.tenant(DEFAULT_TENANT), is_operator=True)
        entry = self._entry(authorization)
        return Caller(self.tenant(entry.tenant), entry.key_id, entry.scope is KeyScope.OPERATOR)

    def operator(self, authorization: str | None) -> Caller:
        """Like `caller`, for what tells of all tenants. Raises Forbidden unless the key is an operator's."""
        caller = self.caller(authorization)
        if not caller.is_operator:
            raise Forbidden("this needs an operator's API key")
        return caller

    def operator_at(self, headers: Mapping[str, str]) -> Caller:
        """`operator`, and where anybody on this machine counts as one, no page of another site that is open
        in a browser there.
        """
        if not self.are_keys_required:
            refuse_foreign_pages(headers)
        return self.operator(headers.get("authorization"))

    def tenant(self, tenant_id: TenantId) -> Tenant:
        """The tenant of that name, with its limits."""
        known = self._tenants.get(tenant_id)
        if known is None:
            known = self._tenants[tenant_id] = Tenant(
                tenant_id, self._limits_of(tenant_id), cache_salt_of(self._config, tenant_id)
            )
        return known

    async def keep_keys(self) -> None:
        """`reload` every now and then, until cancelled."""
        while self._config.keys_file is not None:
            await self._sleep(self._config.reload_s)
            try:
                await self.reload()
            except Exception:  # noqa: BLE001 - logged; keys must not stop being read for ever
                _log.exception("the API keys stay as they were")

    async def reload(self) -> None:
        """Read the keys file again if it has changed. One that cannot be read changes nothing, and is tried
        again: its right to be read may come back without a change of the file.
        """
        path = self._config.keys_file
        assert path is not None
        stamp = await asyncio.to_thread(stamp_of, path)
        if stamp == self._stamp and self._trouble is None:
            return
        try:
            content = await asyncio.to_thread(read_key_file, path)
        except InvalidConfig as error:
            if error.message != self._trouble:
                _log.error("the API keys stay as they were: %s", error.message)
            self._trouble = error.message
            return
        self._stamp, self._trouble = stamp, None
        self._use(content)
        _log.info("%d API keys are known now", len(self._ring.entries))

    def _use(self, content: KeyFile) -> None:
        self._ring, self._file = KeyRing(self._given + content.entries), content
        self._tenants.clear()  # their limits may be others now

    def _limits_of(self, tenant_id: TenantId) -> TenantLimits:
        own = None if self._file is None else self._file.limits_of(tenant_id)
        listed = own or self._config.limits_of(tenant_id)
        if listed is not None:
            return listed
        if self.are_keys_required:
            return TenantLimits(tenant_id)
        return TenantLimits(tenant_id, max_priority=MAX_PRIORITY)

    def _entry(self, authorization: str | None) -> KeyEntry:
        if authorization is None:
            raise Unauthorized("an API key is required: Authorization: Bearer KEY")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("the Authorization header must be: Bearer KEY")
        entry = self._ring.find(key.strip())
        if entry is None:
            raise Unauthorized("the API key is not known")
        return entry


def cache_salt_of(config: TenantsConfig, tenant_id: TenantId) -> str:
    """The salt of a tenant's block names; the same in each router. Empty where there is only one tenant, or
    where the operator has them share.
    """
    return tenant_id if config.are_keys_required and not config.share_prefixes else ""
