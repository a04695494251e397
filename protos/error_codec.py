"""ServingError ↔ bytes, the form in which an error crosses a process: a serialized ErrorDetail.

It travels as the trailing metadata entry `ERROR_METADATA_KEY` of a failed call and inside a refusing push
acknowledgement. Metadata has a size limit of a few KiB, so long texts are clipped. Pure functions; usable from any
thread.
"""

from __future__ import annotations

import json

from google.protobuf.message import DecodeError

from core.errors import ServingError, error_from_code
from protos import inference_pb2 as pb

ERROR_METADATA_KEY = "baton-error-bin"

_MAX_MESSAGE_CHARS = 1500
_MAX_DETAIL_CHARS = 300
_MAX_DETAILS = 12

_Details = dict[str, str | int | float | None]


def encode_error(error: ServingError) -> bytes:
    """A serialized ErrorDetail, at most about 6 KiB whatever the error holds."""
    details: _Details = {}
    for key, value in list(error.details.items())[:_MAX_DETAILS]:
        details[key] = _clip(value, _MAX_DETAIL_CHARS) if isinstance(value, str) else value
    message = pb.ErrorDetail(
        code=error.code,
        message=_clip(error.message, _MAX_MESSAGE_CHARS),
        details_json=json.dumps(details),
    )
    return message.SerializeToString()


def decode_error(data: bytes) -> ServingError:
    """The error that `data` describes, to be raised by the caller.

    It is always an error: bytes that cannot be read, or a code of a newer peer, become a plain ServingError that
    keeps what could be read.
    """
    try:
        message = pb.ErrorDetail.FromString(data)
    except DecodeError:
        return ServingError("the peer answered with an error that cannot be read")
    return error_from_code(message.code, message.message, _details(message.details_json))


def _details(text: str) -> _Details:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    # "self" and "message" are parameters of the constructor, never details
    return {
        key: value
        for key, value in found.items()
        if key not in ("self", "message") and (value is None or isinstance(value, str | int | float))
    }


def _clip(text: str, max_chars: int) -> str:
    """`text` as valid UTF-8 (lone surrogates replaced), shortened with an ellipsis."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"
