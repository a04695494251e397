"""ServingError ↔ bytes, the form in which an error crosses a process: a serialized ErrorDetail.

It travels as the trailing metadata entry `ERROR_METADATA_KEY` of a failed call and inside a refusing push
acknowledgement. Metadata has a size limit of a few KiB, so long texts are clipped. Pure functions; usable
from any thread.
"""

from __future__ import annotations

import json

from google.protobuf.message import DecodeError

from core.errors import ServingError, error_from_code
from protos import inference_pb2 as pb

ERROR_METADATA_KEY = "baton-error-bin"

# gRPC's soft limit for all metadata of a call is 8 KiB
_MAX_MESSAGE_BYTES = 2000
_MAX_DETAIL_BYTES = 400
_MAX_DETAILS_BYTES = 3000

_Details = dict[str, str | int | float | None]


def encode_error(error: ServingError) -> bytes:
    """A serialized ErrorDetail, at most about 5 KiB whatever the error holds; the last details go first."""
    details: _Details = {
        key: _clip(value, _MAX_DETAIL_BYTES) if isinstance(value, str) else value
        for key, value in error.details.items()
    }
    while len(text := json.dumps(details)) > _MAX_DETAILS_BYTES:
        details.popitem()
    message = pb.ErrorDetail(
        code=error.code, message=_clip(error.message, _MAX_MESSAGE_BYTES), details_json=text
    )
    return message.SerializeToString()


def decode_error(data: bytes) -> ServingError:
    """The error that `data` describes, to be raised by the caller.

    It is always an error: bytes that cannot be read, or a code of a newer peer, become a plain ServingError
    that keeps what could be read.
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


def _clip(text: str, max_bytes: int) -> str:
    """`text` as valid UTF-8 (lone surrogates replaced), shortened with an ellipsis."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - len("…".encode())].decode("utf-8", "ignore") + "…"
