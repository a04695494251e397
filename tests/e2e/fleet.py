"""Fleet: the systems of a test session, started on demand, each once, and the models they serve.

Owns how many run at a time (two cores: idle systems cost little, their memory counts) and that all are
stopped. Used from the test's thread.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.model.bundled import prepare_bundled_model
from tests import oracle
from tests.e2e.harness import Profile, System, refuse_to_start
from tests.e2e.reference import Reference
from tests.e2e.vocabulary import Vocabulary

CAPACITY = 3
RAY_WEIGHT = 2
"""A cluster has its processes apart, each with the model of its own; one process shares it."""


class Models:
    """Checkpoint folders: the bundled model and toys with its tokenizer, made once for a session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bundled = prepare_bundled_model()
        self._references: dict[Path, Reference] = {}

    def toy(self, name: str = "toy", arch: str = "llama", **overrides: Any) -> Path:
        """A small random checkpoint with SmolLM2's tokenizer, context 8,192 unless overridden."""
        folder = self._folder / name
        if not folder.exists():
            settings: dict[str, Any] = {"max_position_embeddings": 8192, **overrides}
            oracle.make_toy_checkpoint(folder, arch, tokenizer_from=self.bundled, **settings)
        return folder

    def path(self, name: str) -> Path:
        """`smollm2` or `toy`."""
        return self.bundled if name == "smollm2" else self.toy(name)

    def reference(self, folder: Path) -> Reference:
        if folder not in self._references:
            self._references[folder] = Reference(folder)
        return self._references[folder]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_folder(self.bundled)


class Fleet:
    """Keeps as many systems as `CAPACITY` allows, stopping those that were not asked for the longest."""

    def __init__(self, models: Models, folder: Path) -> None:
        self.models = models
        self._folder = folder
        self._systems: OrderedDict[tuple[str, str, bool], System] = OrderedDict()

    def system(self, profile: Profile, model: str = "smollm2", is_local: bool = True) -> System:
        """The running system of that profile, started if need be."""
        key = (profile.name, model, is_local)
        if key in self._systems:
            self._systems.move_to_end(key)
            return self._systems[key]
        while self._systems and self._weight() + _weight(is_local) > CAPACITY:
            self._systems.popitem(last=False)[1].stop()
        name = f"{profile.name}-{model}-{'local' if is_local else 'ray'}"
        folder = None if model == "smollm2" else self.models.path(model)
        started = System(
            dataclasses.replace(profile, name=name, model=folder, is_local=is_local), self._folder
        )
        self._systems[key] = started
        return started

    @contextmanager
    def once(self, profile: Profile, model: Path) -> Iterator[System]:
        """A system of its own for the length of a test."""
        with System(dataclasses.replace(profile, model=model), self._folder) as system:
            yield system

    def refuses(self, profile: Profile, model: Path) -> str:
        """The log of a start that must be refused."""
        return refuse_to_start(dataclasses.replace(profile, model=model), self._folder)

    def _weight(self) -> int:
        return sum(_weight(is_local) for _, _, is_local in self._systems)

    def stop(self) -> None:
        failures: list[str] = []
        while self._systems:
            _, system = self._systems.popitem()
            try:
                system.stop()
            except AssertionError as failure:
                failures.append(str(failure))
        assert not failures, "\n".join(failures)


def _weight(is_local: bool) -> int:
    return 1 if is_local else RAY_WEIGHT
