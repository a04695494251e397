"""Each answer of a running cluster carries one X-Request-Id: the client's if it can be used, else ours."""

from __future__ import annotations

import http.client
import json

import pytest

from tests.e2e import profiles
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


def request_ids(system: System, *, is_streamed: bool = False, given: str | None = None) -> list[str]:
    """Each X-Request-Id header of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=60)
    words = {"model": system.client.model, "prompt": "Hello", "max_tokens": 2, "stream": is_streamed}
    body = json.dumps(words)
    headers = {"content-type": "application/json", **({} if given is None else {"x-request-id": given})}
    try:
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        return [value for name, value in response.getheaders() if name.lower() == "x-request-id"]
    finally:
        connection.close()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_clients_request_id_comes_back_once(system: System, is_streamed: bool) -> None:
    assert request_ids(system, is_streamed=is_streamed, given="from-the-client") == ["from-the-client"]


def test_an_answer_without_a_given_request_id_has_one(system: System) -> None:
    (made,) = request_ids(system)
    assert made


def test_a_request_id_that_is_no_plain_name_is_replaced(system: System) -> None:
    (made,) = request_ids(system, given="a b; c" * 50)
    assert made.startswith("cmpl-")
