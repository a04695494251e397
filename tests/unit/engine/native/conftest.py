"""The native operators, once for each instruction set that this processor has."""

from __future__ import annotations

import pytest

from engine.native.build import NativeUnavailable
from engine.native.operators import ISA_VARIABLE, NativeOps, load_ops


@pytest.fixture(params=["avx2", "avx512"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chosen by the environment for everything that the test loads."""
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> NativeOps:
    try:
        return load_ops()
    except NativeUnavailable as error:
        pytest.skip(str(error))
