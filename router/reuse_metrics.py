"""ReuseMetrics: what a router counts about KV that was there already, somewhere else.

Owns the series of pulls (cached blocks that went from a decode worker to a prefill worker) and of resumes
(requests that went on elsewhere after a failure). Used on the event loop.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from core import telemetry


class ReuseMetrics:
    """Part of `RouterMetrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pulls = Counter(
            telemetry.PULLS,
            "Prompts whose cached blocks a prefill worker was sent, by outcome: done, or an error code.",
            ("outcome",),
            registry=registry,
        )
        self._pulled = Counter(
            telemetry.PULLED_TOKENS,
            "Tokens whose KV was sent to a prefill worker instead of being computed there.",
            registry=registry,
        )
        self._resumed = Counter(
            telemetry.RESUMED_TOKENS,
            "Tokens (prompt and emitted) of requests placed again after a failure, by what became of them: "
            "cached where they went on, or recomputed.",
            ("kind",),
            registry=registry,
        )

    def pulled(self, outcome: str, num_tokens: int = 0) -> None:
        """`outcome`: `done`, or the code of the error that ended it."""
        self._pulls.labels(outcome).inc()
        self._pulled.inc(num_tokens)

    def resumed(self, num_cached: int, num_recomputed: int) -> None:
        """A request that was placed again has its next token."""
        self._resumed.labels("cached").inc(num_cached)
        self._resumed.labels("recomputed").inc(num_recomputed)
