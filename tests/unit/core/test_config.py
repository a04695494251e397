"""A mapping becomes a frozen dataclass or an error that names the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from core.config import from_mapping, merge, nested
from core.errors import InvalidConfig


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    size: int = 16
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    path: Path
    inner: Inner = field(default_factory=Inner)
    is_on: bool = False
    limit: int | None = 3
    colour: Colour = Colour.RED
    plan: Literal["auto", "local"] = "auto"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.limit == 13:
            raise ValueError("limit must not be 13")


def test_values_and_their_text_forms_give_the_same_settings() -> None:
    typed = {
        "path": Path("/a"), "inner": {"size": 8, "rate": 2}, "is_on": True, "limit": None,
        "colour": "blue", "plan": "local", "names": ["a", "b"],
    }  # fmt: skip
    text = {
        "path": "/a", "inner": {"size": "8", "rate": "2"}, "is_on": "yes", "limit": "none",
        "colour": "blue", "plan": "local", "names": "a, b",
    }  # fmt: skip
    expected = Outer(Path("/a"), Inner(8, 2.0), True, None, Colour.BLUE, "local", ("a", "b"))
    assert from_mapping(Outer, typed) == from_mapping(Outer, text) == expected


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "path"),
        ({"path": "/a", "colour": "green"}, "colour"),
        ({"path": "/a", "inner": {"sizes": 1}}, "inner.sizes"),
        ({"path": "/a", "inner": {"size": 1.5}}, "inner.size"),
        ({"path": "/a", "inner": {"size": True}}, "inner.size"),
        ({"path": "/a", "inner": {"size": "many"}}, "inner.size"),
        ({"path": "/a", "inner": {"rate": float("nan")}}, "inner.rate"),
        ({"path": "/a", "inner": {"rate": "inf"}}, "inner.rate"),
        ({"path": "/a", "inner": {"rate": 10**400}}, "inner.rate"),
        ({"path": "/a", "inner": 3}, "inner"),
        ({"path": "/a", "is_on": "maybe"}, "is_on"),
        ({"path": "/a", "is_on": 1}, "is_on"),
        ({"path": "/a", "plan": "remote"}, "plan"),
        ({"path": "/a", "names": ["a", 1]}, "names[1]"),
        ({"path": 5}, "path"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        from_mapping(Outer, values)
    assert caught.value.details["key"] == key
    assert key in caught.value.message


def test_a_rule_of_the_dataclass_is_reported_as_a_setting() -> None:
    with pytest.raises(InvalidConfig, match="limit must not be 13"):
        from_mapping(Outer, {"path": "/a", "limit": 13})


def test_later_sources_win_key_by_key() -> None:
    base = {"path": "/a", "inner": {"size": 1, "rate": 1.0}}
    assert merge(base, nested("inner.size", 2)) == {"path": "/a", "inner": {"size": 2, "rate": 1.0}}


def test_a_value_where_a_section_should_be_is_not_lost_below_one() -> None:
    with pytest.raises(InvalidConfig, match=r"path\.inner must be a mapping, not int"):
        merge({"path": {"inner": 5}}, nested("path.inner.size", 2))
    assert merge({"inner": None}, nested("inner.size", 2)) == {"inner": {"size": 2}}
