"""Each test that asks for a way runs once for each way that payloads can travel."""

from __future__ import annotations

import pytest

from tests.integration.kv_transfer.ends import WAYS


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    """How payloads travel; the label under which they are counted."""
    name: str = request.param
    return name
