"""The start's own API key, where keys are asked for.

Owns that key, which nobody else ever sees. Reads the keys file once, so that a wrong one stops the start.
Main thread.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.config import BatonConfig
from router.api_keys import KeyScope, new_entry, new_key, new_salt
from router.tenants import Tenants

_START_TENANT = "operator"


def with_start_key(config: BatonConfig) -> tuple[BatonConfig, str | None]:
    """The configuration with one more operator's key, made for this run, and that key: the start asks its
    own service whether it is ready and for a sample. None where no keys are asked for.

    Raises InvalidConfig if the configured keys cannot be used.
    """
    tenants = config.router.tenants
    Tenants(tenants)
    if not tenants.are_keys_required:
        return config, None
    key = new_key()
    entry = new_entry(key, _START_TENANT, new_salt(), KeyScope.OPERATOR)
    tenants = replace(tenants, keys=(*tenants.keys, entry.as_text()))
    return replace(config, router=replace(config.router, tenants=tenants)), key
