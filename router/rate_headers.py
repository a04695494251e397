"""The x-ratelimit-* headers: what a tenant may have, what is left, and when all of it is back. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router.leases import Lease
from router.limits import LimitKind

_NAMES = {
    LimitKind.REQUESTS: "requests",
    LimitKind.PROMPT_TOKENS: "prompt-tokens",
    LimitKind.OUTPUT_TOKENS: "output-tokens",
}


def rate_headers(leases: Mapping[LimitKind, Lease], now: float) -> dict[str, str]:
    """Named as OpenAI names them; `tokens` is the scarcer of prompt and output."""
    headers: dict[str, str] = {}
    known = {kind: leases[kind] for kind in _NAMES if kind in leases}
    for kind, lease in known.items():
        headers |= _three(_NAMES[kind], lease, now)
    tokens = [lease for kind, lease in known.items() if kind is not LimitKind.REQUESTS]
    if tokens:
        headers |= _three("tokens", min(tokens, key=lambda lease: lease.num_left(now) / lease.size), now)
    return headers


def _three(name: str, lease: Lease, now: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(lease.size),
        f"x-ratelimit-remaining-{name}": str(lease.num_left(now)),
        f"x-ratelimit-reset-{name}": duration(lease.bucket.wait_s(lease.bucket.held, now)),
    }


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 120ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text
