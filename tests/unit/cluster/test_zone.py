"""A node's zone comes from Ray's labels."""

from __future__ import annotations

import pytest

from cluster.zone import zone_of


@pytest.mark.parametrize(
    ("labels", "zone"),
    [
        ({}, ""),
        ({"ray.io/node-id": "ab"}, ""),
        ({"zone": "rack-1"}, "rack-1"),
        ({"zone": "rack-1", "ray.io/availability-zone": "us-east-1a"}, "us-east-1a"),
    ],
)
def test_the_zone_is_that_of_the_labels(labels: dict[str, str], zone: str) -> None:
    assert zone_of(labels) == zone
