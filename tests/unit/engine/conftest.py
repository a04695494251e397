"""The engine's promises hold for torch's operators and for the native ones."""

from __future__ import annotations

import pytest

from engine.native.build import NativeUnavailable
from engine.native.operators import load_ops


@pytest.fixture(scope="session", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    """As `EngineConfig.cpu_kernels` names them."""
    if request.param == "native":
        try:
            load_ops()
        except NativeUnavailable as error:
            pytest.skip(str(error))
    return str(request.param)
