"""The log line of a call that ended; that of each placement is in `placement_log`.

Owns its fields: ids, tokens, milliseconds; never anything of what was said. Written where
`logging.calls` is set. Used on the event loop.
"""

from __future__ import annotations

import logging
from typing import Any

from router.metrics import Outcome
from router.spans import EndedCall

_log = logging.getLogger("router.calls")


def log_ended(call: EndedCall, outcome: Outcome, reason: str) -> None:
    """A call is over, whatever way."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": call.call_id,
        "endpoint": call.endpoint,
        "outcome": outcome.value,
        "reason": reason,
        "ms": round((call.ended_at - call.arrived_at) * 1e3, 3),
    }
    if call.answering is not None:
        usage = call.answering.usage()
        first = [reader.stamps.ttft_s for reader in call.answering.readers]
        waits = [seconds for seconds in first if seconds is not None]
        fields |= {
            "prompt_tokens": usage.num_prompt_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
            "ttft_ms": round(max(waits) * 1e3, 3) if waits else None,
        }
    _log.info("ended", extra=fields)
