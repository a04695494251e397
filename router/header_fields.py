"""The headers of a request as one value for each name.

Owns what a repeated header means: its values joined by commas (RFC 9110, 5.2). One that may stand once only
is then no legal value of its kind, so that nobody takes the first while somebody else takes the last. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable


def header_fields(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name, as ASGI servers send them."""
    found: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
