"""The keys file: JSON that holds salted hashes of API keys and tenants' limits. `baton keys` writes it, the
routers read it.

Owns its format, writing it whole or not at all, and noticing that it has changed. Blocking file access; the
router calls it on another thread.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.config import from_mapping
from core.errors import InvalidConfig
from core.ids import TenantId
from router.api_keys import KeyEntry, KeyScope, is_hex, new_salt, tenant_id
from router.tenants_config import ANY_TENANT, TenantLimits

_VERSION = 1
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The whole content: one salt, the keys hashed under it, limits that go before the configured."""

    salt: str
    entries: tuple[KeyEntry, ...]
    limits: tuple[TenantLimits, ...] = ()

    def limits_of(self, tenant: TenantId) -> TenantLimits | None:
        return next((limits for limits in self.limits if limits.name == tenant), None)


def read_key_file(path: Path) -> KeyFile:
    """Raises InvalidConfig that names the file and what is wrong in it, never a hash."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _wrong(path, f"is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise _wrong(path, f"is not a keys file of version {_VERSION}")
    salt, keys = data.get("salt"), data.get("keys")
    if not isinstance(salt, str) or not is_hex(salt, 16):
        raise _wrong(path, "has no usable salt")
    if not isinstance(keys, list):
        raise _wrong(path, "has no list of keys")
    entries = tuple(_entry(path, index, item, salt) for index, item in enumerate(keys))
    return KeyFile(salt, entries, _limits(path, data.get("limits", [])))


def write_key_file(path: Path, content: KeyFile) -> None:
    """Replace the file at once; only its owner may read it."""
    keys = [
        {
            "id": entry.key_id,
            "tenant": entry.tenant,
            "sha256": entry.digest,
            "scope": entry.scope.value,
            "created": entry.created,
        }
        for entry in content.entries
    ]
    tree = {"version": _VERSION, "salt": content.salt, "keys": keys}
    if content.limits:
        tree["limits"] = [_what_differs(limits) for limits in content.limits]
    data = json.dumps(tree, indent=2) + "\n"
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


@contextmanager
def editing(path: Path) -> Iterator[KeyFile]:
    """The content, an empty one if there is no file yet, while nobody else edits it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_key_file(path) if path.exists() else KeyFile(new_salt(), ())


def stamp_of(path: Path) -> Stamp | None:
    """Changes whenever the file is replaced or written to; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _entry(path: Path, index: int, item: Any, salt: str) -> KeyEntry:
    where = f"keys[{index}]"
    if not isinstance(item, dict):
        raise _wrong(path, f"{where} must be an object")
    texts = {name: item.get(name) for name in ("id", "tenant", "sha256")}
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise _wrong(path, f"{where}.{name} must be text")
    digest = str(texts["sha256"])
    if len(digest) != 64 or not is_hex(digest, 64):
        raise _wrong(path, f"{where}.sha256 must be 64 hex digits")
    try:
        scope = KeyScope(item.get("scope", KeyScope.CLIENT))
        tenant = tenant_id(str(texts["tenant"]))
    except (ValueError, InvalidConfig) as error:
        raise _wrong(path, f"{where}: {error}") from error
    return KeyEntry(str(texts["id"]), tenant, salt, digest, scope, str(item.get("created", "")))


def _limits(path: Path, items: Any) -> tuple[TenantLimits, ...]:
    if not isinstance(items, list):
        raise _wrong(path, "has limits that are no list")
    found: dict[str, TenantLimits] = {}
    for index, item in enumerate(items):
        try:
            limits = from_mapping(TenantLimits, item, f"limits[{index}]")
        except InvalidConfig as error:
            raise _wrong(path, error.message) from error
        if limits.name == ANY_TENANT:
            raise _wrong(path, f"limits[{index}].name: limits for any tenant belong in the configuration")
        if limits.kv_share is not None:
            raise _wrong(
                path, f"limits[{index}].kv_share is read at the start only: set it in the configuration"
            )
        if limits.name in found:
            raise _wrong(path, f"limits name the tenant {limits.name} twice")
        found[limits.name] = limits
    return tuple(found.values())


def _what_differs(limits: TenantLimits) -> dict[str, Any]:
    plain = asdict(TenantLimits(limits.name))
    return {"name": limits.name} | {
        key: value for key, value in asdict(limits).items() if value != plain[key]
    }


def _wrong(path: Path, what: str) -> InvalidConfig:
    return InvalidConfig(f"router.tenants.keys_file: {path} {what}", key="router.tenants.keys_file")
