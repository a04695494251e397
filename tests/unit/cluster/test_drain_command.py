"""`baton drain`: a worker is asked of the service, a node of its cluster, and what fits neither is named."""

from __future__ import annotations

import pytest

from cluster.drain_command import drain
from core.errors import InvalidConfig


def test_a_node_has_a_cluster_and_a_worker_a_service_and_nothing_has_both() -> None:
    for url, port in ((None, 8000), ("http://127.0.0.1:8000", None)):
        with pytest.raises(InvalidConfig, match="--address is of a node's cluster") as caught:
            drain("decode-a", url=url, port=port, address="auto")
        assert caught.value.details["key"] == "address"


@pytest.mark.parametrize("name", ["decode-k2j4", "10.0.0.1"])
def test_whoever_names_a_service_means_a_worker_of_it(name: str) -> None:
    with pytest.raises(InvalidConfig, match="no service of yours runs on port 1 of this machine"):
        drain(name, port=1)
