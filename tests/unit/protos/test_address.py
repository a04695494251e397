"""Where a worker listens is written so that those who connect there can read it."""

from __future__ import annotations

import pytest

from protos.service import address_of


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.7", "10.0.0.7:50051"), ("node-1", "node-1:50051"), ("fd00::7", "[fd00::7]:50051")],
)
def test_a_host_of_ipv6_stands_in_brackets(host: str, address: str) -> None:
    assert address_of(host, 50051) == address
