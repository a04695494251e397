"""Each error has its own code and survives pickling and the wire form."""

from __future__ import annotations

import pickle

import pytest

from core import errors
from core.errors import ServingError, error_from_code


def all_kinds(kind: type[ServingError] = ServingError) -> list[type[ServingError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in all_kinds(child))]


@pytest.mark.parametrize("kind", all_kinds())
def test_an_error_survives_pickling(kind: type[ServingError]) -> None:
    error = pickle.loads(pickle.dumps(kind("it broke", worker="p0", limit=3)))
    assert type(error) is kind
    assert (error.message, error.details) == ("it broke", {"worker": "p0", "limit": 3})


@pytest.mark.parametrize("kind", [kind for kind in all_kinds() if not kind.__subclasses__()])
def test_a_leaf_is_found_again_by_its_code(kind: type[ServingError]) -> None:
    assert type(error_from_code(kind.code, "x", {})) is kind


def test_an_unknown_code_keeps_its_text() -> None:
    error = error_from_code("from_the_future", "x", {"a": 1})
    assert type(error) is ServingError
    assert "from_the_future" in error.message
    assert error.details == {"a": 1}


def test_client_faults_are_not_retried_and_server_faults_say_so() -> None:
    assert not errors.InvalidRequest("x").retryable
    assert errors.ReservationRefused("x").retryable
    assert errors.WorkerLost("x").http_status == 503
