"""Where settings come from: one YAML file, `BATON_SECTION__KEY` variables, `--section.key=value` flags.

Owns reading and their order (flags win over the environment, which wins over the file). What a setting means,
its type and its default belong to the package it configures. Pure apart from reading the file; runs once, at
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from core.config import merge, nested
from core.errors import InvalidConfig

ENVIRONMENT_PREFIX = "BATON_"


def settings_from_file(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds; an empty file or section is an empty mapping. Raises InvalidConfig, also
    for a key that stands there twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not UTF-8 text: {error.reason}", key=str(path)) from error
    except OSError as error:
        raise InvalidConfig(
            f"cannot read the configuration file {path}: {error.strerror}", key=str(path)
        ) from error
    try:
        loaded = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InvalidConfig(f"{path} is not valid YAML: {error}", key=str(path)) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidConfig(f"{path} must hold sections, not {type(loaded).__name__}", key=str(path))
    return {str(section): {} if values is None else values for section, values in loaded.items()}


class _Loader(yaml.SafeLoader):
    """Of a key that stands in a mapping twice YAML's own loader takes the last, without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return node


def settings_from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`BATON_ENGINE__BLOCK_SIZE=16` is `engine.block_size`. Names without `__` are not settings."""
    found: dict[str, Any] = {}
    for name, value in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            found = merge(found, nested(path, value))
    return found


def settings_from_flags(arguments: Iterable[str]) -> dict[str, Any]:
    """`--engine.block_size=16` or `--engine.block_size 16`. Raises InvalidConfig for anything else."""
    found: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, value = argument.partition("=")
        path = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or "." not in path.strip("."):
            raise InvalidConfig(
                f"unknown option {argument}; settings are written --section.key=value", key=argument
            )
        if not has_value:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise InvalidConfig(f"option {name} needs a value", key=path)
        found = merge(found, nested(path, value))
    return found
