"""Server-sent events as OpenAI frames them.

Owns bytes only: `data: `, one line of JSON, an empty line; `[DONE]` ends a whole answer. An error ends a
broken one: it is the last event, and no `[DONE]` follows. Pure.
"""

from __future__ import annotations

from typing import Any

import orjson

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def frame(body: dict[str, Any]) -> bytes:
    """One event; JSON escapes line breaks, so the event has one line."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
