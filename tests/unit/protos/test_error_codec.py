"""Errors keep their type across a process border, fit into metadata, and are never lost when unreadable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import errors
from protos import inference_pb2 as pb
from protos.error_codec import decode_error, encode_error
from tests.unit.protos.strategies import quick

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ServingError) and "code" in vars(kind)
]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
details = st.dictionaries(
    texts.filter(lambda key: key not in ("self", "message")),
    st.none() | texts | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False),
    max_size=8,
)


@quick
@given(st.sampled_from(KINDS), texts, details)
def test_an_error_keeps_its_code_its_text_and_its_details(
    kind: type[errors.ServingError], message: str, facts: dict[str, str | int | float | None]
) -> None:
    decoded = decode_error(encode_error(kind(message, **facts)))
    assert decoded.code == kind.code
    assert (decoded.message, decoded.details) == (message, facts)


@pytest.mark.parametrize(
    "kind", [errors.ReservationRefused, errors.StaleEpoch, errors.TicketExpired, errors.WorkerDraining]
)
def test_an_error_is_raised_as_the_same_type_on_the_other_side(kind: type[errors.ServingError]) -> None:
    assert type(decode_error(encode_error(kind("no")))) is kind


def test_an_unknown_code_becomes_a_plain_error_that_keeps_the_text() -> None:
    decoded = decode_error(pb.ErrorDetail(code="of_tomorrow", message="hello").SerializeToString())
    assert type(decoded) is errors.ServingError
    assert "of_tomorrow" in decoded.message
    assert "hello" in decoded.message


@quick
@given(st.binary(max_size=60))
def test_any_bytes_give_an_error_and_never_raise(data: bytes) -> None:
    assert isinstance(decode_error(data), errors.ServingError)


@pytest.mark.parametrize(
    "details_json",
    ["{", "[1]", '"x"', '{"message": "a", "self": 1, "ok": 2, "list": []}', "[" * 100_000, ""],
)
def test_details_that_cannot_be_read_do_not_hide_the_error(details_json: str) -> None:
    data = pb.ErrorDetail(code="stale_epoch", message="m", details_json=details_json).SerializeToString()
    decoded = decode_error(data)
    assert isinstance(decoded, errors.StaleEpoch)
    assert set(decoded.details) <= {"ok"}


def test_a_huge_error_fits_into_call_metadata() -> None:
    error = errors.StepFailed("é\ud800" * 10_000, **{f"key{i}": "ü" * 10_000 for i in range(50)})
    data = encode_error(error)
    assert len(data) < 5_500
    assert decode_error(data).message.startswith("é?é?")
