"""The log line of a placement: ids, workers, tokens, milliseconds; never anything of what was said.

Written where `logging.calls` is set, as those of `call_log`, which knows the calls themselves. Used on the
event loop.
"""

from __future__ import annotations

import logging
from typing import Any

from core.ids import RequestId, TicketId
from router.decision import Decision

_log = logging.getLogger("router.calls")


def log_placed(request_id: RequestId, attempt: int, ticket_id: TicketId | None, decision: Decision) -> None:
    """A request goes to its workers; with a handoff it has a ticket."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": attempt,
        "plan": decision.plan.value,
        "cost_ms": round(decision.cost_ms, 3),
        "cached_tokens": decision.num_cached_tokens,
    }
    if ticket_id is not None:
        fields["ticket_id"] = ticket_id
    for name, candidate in (
        ("prefill_worker", decision.prefill),
        ("decode_worker", decision.decode),
        ("pull_from", decision.pull_from),
    ):
        if candidate is not None:
            fields[name] = candidate.ref.worker_id
    _log.info("placed", extra=fields)
