"""Fixtures of the end-to-end tests: the fleet and what each test asks of a system afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet, Models
from tests.e2e.vocabulary import Vocabulary


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
