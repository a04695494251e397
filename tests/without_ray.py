"""Ray made impossible to import: what the unit and integration suites run under.

Engine, bridge, workers, router and the pure parts of cluster are built and tested without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class RayIsBlocked(MetaPathFinder):
    """Comes first on the import path and refuses one package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "ray":
            raise ImportError(f"{fullname}: this suite runs without Ray")
        return None


def block_ray() -> None:
    """From now on, in this process. Fails if Ray is already loaded."""
    assert "ray" not in sys.modules, "Ray was imported before it was blocked"
    if not any(isinstance(finder, RayIsBlocked) for finder in sys.meta_path):
        sys.meta_path.insert(0, RayIsBlocked())
