"""Keys of tenants for tests: made in a keys file, as `baton keys add` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from router.api_keys import KeyScope, new_entry, new_key
from router.key_file import editing, write_key_file


def add_key(path: Path, tenant: str, scope: KeyScope = KeyScope.CLIENT) -> str:
    """The key in plain text, which is kept nowhere."""
    key = new_key()
    with editing(path) as content:
        entry = new_entry(key, tenant, content.salt, scope)
        write_key_file(path, replace(content, entries=(*content.entries, entry)))
    return key
