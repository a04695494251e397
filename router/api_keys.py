"""API keys: how they are made, what is kept of them, and how one is recognised.

Owns the form of a key and of its hash. Keys are 256 random bits, so a salted hash needs no stretching. Only
hashes are kept, and each is compared in constant time. Pure; usable from any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from core.errors import InvalidConfig
from core.ids import TenantId
from router.tenants_config import TENANT_NAME

KEY_PREFIX = "sk-baton-"
_KEY_BYTES = 32
_MAX_KEY_CHARS = 256


class KeyScope(StrEnum):
    """`CLIENT`: the inference API. `OPERATOR`: also metrics and debugging, which tell of all tenants."""

    CLIENT = "client"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """What is kept of one key. `salt` and `digest` in hex; `key_id` is its public name."""

    key_id: str
    tenant: TenantId
    salt: str
    digest: str
    scope: KeyScope = KeyScope.CLIENT
    created: str = ""

    def as_text(self) -> str:
        """One line for a setting: `tenant:salt:digest:scope`."""
        return f"{self.tenant}:{self.salt}:{self.digest}:{self.scope.value}"


def new_key() -> str:
    """A fresh key; shown once, kept nowhere."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def new_salt() -> str:
    return secrets.token_hex(16)


def digest_of(key: str, salt: str) -> str:
    """Hex HMAC-SHA256 of the key under the salt."""
    return hmac.new(bytes.fromhex(salt), key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def new_entry(
    key: str, tenant: str, salt: str, scope: KeyScope = KeyScope.CLIENT, created: str = ""
) -> KeyEntry:
    """What to keep of `key`. Raises InvalidConfig for a tenant's name that cannot be one."""
    digest = digest_of(key, salt)
    return KeyEntry(f"key-{digest[:12]}", tenant_id(tenant), salt, digest, scope, created)


def tenant_id(name: str) -> TenantId:
    if not TENANT_NAME.fullmatch(name):
        raise InvalidConfig(f"tenant {name[:80]!r} must be up to 64 of A-Z a-z 0-9 . _ -", key="tenant")
    return TenantId(name)


def entry_from_text(text: str, where: str) -> KeyEntry:
    """The reverse of `KeyEntry.as_text`. Raises InvalidConfig that names `where`, not the value."""
    tenant, *rest = text.split(":")
    if len(rest) not in (2, 3) or not all(is_hex(part, 16) for part in rest[:2]) or len(rest[1]) != 64:
        raise InvalidConfig(
            f"setting {where} must be tenant:salt:hash:scope, as `baton keys hash` prints it", key=where
        )
    try:
        scope = KeyScope(rest[2]) if len(rest) == 3 else KeyScope.CLIENT
    except ValueError:
        raise InvalidConfig(f"setting {where}: the scope must be client or operator", key=where) from None
    return KeyEntry(f"key-{rest[1][:12]}", tenant_id(tenant), rest[0], rest[1], scope)


def is_hex(text: str, min_chars: int) -> bool:
    return len(text) >= min_chars and len(text) % 2 == 0 and set(text) <= set("0123456789abcdef")


class KeyRing:
    """All keys that are known at present."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self.entries = tuple(entries)
        self._salts = tuple({entry.salt for entry in self.entries})

    def find(self, key: str) -> KeyEntry | None:
        """The entry of `key`. An unknown key takes as long, whatever it has in common with a known one."""
        if len(key) > _MAX_KEY_CHARS:
            return None
        digests = {salt: digest_of(key, salt) for salt in self._salts}
        found: KeyEntry | None = None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digests[entry.salt]):
                found = entry
        return found

    def tenants(self) -> frozenset[TenantId]:
        return frozenset(entry.tenant for entry in self.entries)
