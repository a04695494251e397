"""Fixtures of the acceptance grids: the fleet of the end-to-end tests, and rows for the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.fleet import Fleet, Models

Report = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All grids are slow."""
    for item in items:
        if "accept" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(models, tmp_path_factory.mktemp("systems"))
    yield fleet
    fleet.stop()


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """`report(point, what, result)` adds a line to the acceptance table; seconds count from the last line."""
    last = time.monotonic()

    def add(point: str, what: str, result: object) -> None:
        nonlocal last
        now = time.monotonic()
        record_property("row", (point, what, str(result), round(now - last, 1)))
        last = now

    return add
