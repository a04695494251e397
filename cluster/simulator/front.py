"""FrontPrice and Front: what a request takes before it is placed: HTTP, its text, its tokens.

Owns the router's line: it is one process, which does one thing at a time. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.simulator.sharing import Host


@dataclass(frozen=True, slots=True)
class FrontPrice:
    """Seconds: `request_s` for each request, `token_s` for each token of its prompt; `busy_s` more on the way
    to and from its worker while workers compute on the cores that router and messages need, too.
    """

    request_s: float = 0.0
    token_s: float = 0.0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request_s", "token_s", "busy_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must not be negative")


class Front:
    """One per router. `host`: whose cores it shares with workers, if it does."""

    def __init__(self, price: FrontPrice, host: Host | None = None) -> None:
        self._price = price
        self._host = host
        self._free_at = 0.0

    def ready_at(self, now: float, num_prompt_tokens: int) -> float:
        """When a request that comes now can be placed."""
        price = self._price
        self._free_at = max(now, self._free_at) + price.request_s + price.token_s * num_prompt_tokens
        # others do not wait for that: it is no work of the router's
        is_busy = self._host is not None and self._host.is_busy(now)
        return self._free_at + (price.busy_s if is_busy else 0.0)
