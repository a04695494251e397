"""Reading JSON from a client: bytes in, plain values out, or an error that says what is wrong with the bytes.

Owns the strictness of the parser: valid UTF-8, no NaN or Infinity, no lone surrogates, bounded depth. Pure.
"""

from __future__ import annotations

from typing import Any

import orjson

from core.errors import InvalidRequest


def parse_json(data: bytes) -> Any:
    """The value that `data` holds. Raises InvalidRequest; the parser itself limits the depth of nesting."""
    if not data:
        raise InvalidRequest("the body is empty, it must be a JSON object")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (byte {error.pos})") from None
