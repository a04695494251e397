"""Settings that make no sense together are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.loadtest.settings import LoadTestSettings
from core.config import from_mapping
from core.errors import InvalidConfig

SLO = {"ttft_s": 1.0}


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({}, "rate"),
        ({"arrivals": {"rate": 0}}, "rate"),
        ({"arrivals": {"kind": "sometimes"}}, "arrivals.kind"),
        ({"arrivals": {"kind": "trace"}}, "arrivals"),
        ({"arrivals": {"kind": "closed", "concurrency": 0}}, "concurrency"),
        ({"workload": {"kind": "trace"}}, "trace"),
        ({"workload": {"prompt": {"low": 5, "high": 2}}}, "5:2"),
        ({"window": {"warm_up_s": 60}}, "warm_up_s"),
        ({"search": {}}, "SLO"),
        ({"search": {}, "slo": SLO, "arrivals": {"kind": "closed"}}, "search"),
        ({"search": {"start": 5, "highest": 2}, "slo": SLO}, "start"),
        ({"target": {"url": "localhost:8000"}}, "url"),
        ({"target": {"extra_body": "[]"}}, "extra_body"),
        ({"target": {"extra_body": "{"}}, "extra_body"),
        ({"target": {"stream_end": "never"}}, "stream_end"),
        ({"max_error_share": 2, "arrivals": {"rate": 1}}, "max_error_share"),
        ({"rates": 1}, "rates"),
    ],
)
def test_the_fault_is_named(tree: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        from_mapping(LoadTestSettings, tree)


def test_a_search_needs_no_rate() -> None:
    found = from_mapping(LoadTestSettings, {"search": {}, "slo": SLO})
    assert found.search is not None
    assert found.search.start is None
