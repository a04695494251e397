"""What all acceptance grids find by name; all of them are slow."""

from __future__ import annotations

import pytest

from tests.e2e.fixtures import fleet, models, report, vocabulary

__all__ = ["fleet", "models", "report", "vocabulary"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Grids are never part of a quick run."""
    for item in items:
        if "accept" in item.path.parts:
            item.add_marker(pytest.mark.slow)
