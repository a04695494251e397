"""How an error looks to an HTTP client: OpenAI's error body, the status, Retry-After.

Owns the translation of `core.errors` at this edge; nothing but ServingErrors is told in words, whatever
else happens is "internal error". Pure.
"""

from __future__ import annotations

from typing import Any

from core.errors import RequestError, ServingError


def error_body(error: ServingError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    param = error.details.get("param")
    return {
        "error": {
            "message": error.message,
            "type": _kind(error),
            "param": param if isinstance(param, str) and param else None,
            "code": error.code,
        }
    }


def error_headers(error: ServingError) -> dict[str, str]:
    """Retry-After (whole seconds) where trying again makes sense; the end of a connection whose request never
    came to its end.
    """
    if error.http_status == 408:
        return {"connection": "close"}
    if error.http_status == 401:
        return {"www-authenticate": "Bearer"}
    if error.http_status not in (429, 503):
        return {}
    after = error.details.get("retry_after_s")
    return {"retry-after": str(max(1, round(after))) if isinstance(after, int | float) else "1"}


def internal_error() -> ServingError:
    """What a client hears of a fault of ours; the log has the rest."""
    return ServingError("internal error")


def _kind(error: ServingError) -> str:
    if isinstance(error, RequestError):
        return "invalid_request_error"
    if error.http_status == 429:
        return "rate_limit_error"
    return "timeout_error" if error.http_status == 504 else "server_error"
