"""Records of requests, made up."""

from __future__ import annotations

from typing import Any

from cluster.loadtest.record import Outcome, RequestRecord


def record(due_s: float = 0.0, *event_times_s: float, **more: Any) -> RequestRecord:
    """Completed at its last event; one token for each event unless `more` says otherwise."""
    given: dict[str, Any] = {
        "index": 0,
        "due_s": due_s,
        "sent_s": due_s,
        "ended_s": event_times_s[-1] if event_times_s else due_s,
        "outcome": Outcome.COMPLETED,
        "event_times_s": event_times_s,
        "num_output_tokens": len(event_times_s),
    }
    return RequestRecord(**{**given, **more})
