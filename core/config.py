"""Configuration: a mapping becomes a frozen dataclass, or an error that names the key.

Owns the rules (unknown keys, types, nested sections, text from environment and flags); each package's
`config.py` owns its section.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from core.errors import InvalidConfig

T = TypeVar("T")


def from_mapping(kind: type[T], values: Any, where: str = "") -> T:
    """Build `kind`, a dataclass, from `values`.

    Sub-sections are nested mappings. Strings are read as the field's type, since environment and flags give
    only text. Raises InvalidConfig naming `where.key` for an unknown key, a missing required key or a value
    of the wrong type.
    """
    if not isinstance(values, Mapping):
        found = type(values).__name__
        raise InvalidConfig(f"{where or 'configuration'} must be a mapping, not {found}", key=where)
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            name, known = _join(where, str(key)), ", ".join(sorted(fields))
            raise InvalidConfig(f"unknown setting {name}; known here: {known}", key=name)
    built: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            built[name] = _convert(hints[name], values[name], _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidConfig(f"setting {_join(where, name)} is required", key=_join(where, name))
    try:
        return kind(**built)
    except ValueError as error:
        raise InvalidConfig(f"{where or 'configuration'}: {error}", key=where) from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """`over` wins, section by section. Raises InvalidConfig naming what is a section there and a value in
    `base`: it would be lost without a word.
    """
    merged = dict(base)
    for key, value in over.items():
        old, name = merged.get(key), _join(where, str(key))
        if isinstance(value, Mapping) and old is not None:
            if not isinstance(old, Mapping):
                raise InvalidConfig(f"{name} must be a mapping, not {type(old).__name__}", key=name)
            value = merge(old, value, name)
        merged[key] = value
    return merged


def nested(path: str, value: Any, separator: str = ".") -> dict[str, Any]:
    """`nested("engine.block_size", 16)` is `{"engine": {"block_size": 16}}`."""
    tree: Any = value
    for part in reversed(path.split(separator)):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_mapping(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_optional(arguments, value, where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise _wrong(where, value, "one of " + ", ".join(map(str, arguments)))
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise _wrong(where, value, "one of " + ", ".join(str(item.value) for item in hint)) from None
    if hint is Any:
        return value
    return _convert_scalar(hint, value, where)


def _convert_optional(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    inner = [argument for argument in arguments if argument is not type(None)]
    has_none = len(inner) < len(arguments)
    if has_none and (value is None or (isinstance(value, str) and value.lower() in ("", "none", "null"))):
        return None
    for argument in inner[:-1]:
        try:
            return _convert(argument, value, where)
        except InvalidConfig:
            continue
    return _convert(inner[-1], value, where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(arguments) != len(value):
        raise _wrong(where, value, f"a list of {len(arguments)}")
    return tuple(_convert(arguments[i], item, f"{where}[{i}]") for i, item in enumerate(value))


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise _wrong(where, value, "true or false")
    if hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise _wrong(where, value, f"a number ({hint.__name__})")
        if hint is int and isinstance(value, float):
            raise _wrong(where, value, "a whole number")
        try:
            number = hint(value)
        except (ValueError, OverflowError):
            raise _wrong(where, value, f"a number ({hint.__name__})") from None
        # no comparison refuses NaN, and no wait is as long as infinity
        if isinstance(number, float) and not math.isfinite(number):
            raise _wrong(where, value, "a finite number")
        return number
    if hint is Path:
        if isinstance(value, str | Path):
            return Path(value).expanduser()
        raise _wrong(where, value, "a path")
    if hint is str:
        if isinstance(value, str):
            return value
        raise _wrong(where, value, "text")
    raise AssertionError(f"{where}: settings of type {hint} are not supported")


def _wrong(where: str, value: Any, wanted: str) -> InvalidConfig:
    return InvalidConfig(f"setting {where} is {value!r}, but must be {wanted}", key=where)
