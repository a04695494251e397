"""Fixtures that the end-to-end tests and the acceptance grids share: models, fleet, rows of the table.

Imported by the conftest of each; owns no assertions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.fleet import Fleet, Models
from tests.e2e.vocabulary import Vocabulary

Report = Callable[[str, str, object], None]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def vocabulary(models: Models) -> Vocabulary:
    return models.vocabulary


@pytest.fixture(scope="session")
def fleet(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All systems of the session; stopped, and proved to be gone, at its end."""
    fleet = Fleet(models, tmp_path_factory.mktemp("systems"))
    yield fleet
    fleet.stop()


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """`report(point, what, result)` is a line of the acceptance table; seconds count from the last one. It is
    printed as well, for a run of one test.
    """
    last = time.monotonic()

    def add(point: str, what: str, result: object) -> None:
        nonlocal last
        now = time.monotonic()
        print(f"{point}: {what}: {result} ({now - last:.1f} s)")
        record_property("row", (point, what, str(result), round(now - last, 1)))
        last = now

    return add
