"""JSON files of a checkpoint: typed access that names file and key when something is wrong.

Owns no meaning of any key. Used at start, from any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import InvalidConfig


def read_json(path: Path, *, is_required: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; `{}` for an absent file that is not required.

    Raises InvalidConfig naming the file when it is missing, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not is_required:
            return {}
        raise InvalidConfig(f"{path.name} is missing in {path.parent}", key=path.name) from None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read as JSON: {error}", key=path.name) from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} must hold a JSON object", key=path.name)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` in the form that checkpoints have: two spaces, characters as they are."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Section:
    """A JSON object with typed reads: `null` counts as absent; a wrong type is an error that names it."""

    values: Mapping[str, Any]
    file: str

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.optional_int(key)
        if value is None:
            if default is None:
                raise InvalidConfig(f"{self.file}: {key} is missing", key=key)
            return default
        if value <= 0:
            raise InvalidConfig(f"{self.file}: {key} must be positive, not {value}", key=key)
        return value

    def optional_int(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidConfig(f"{self.file}: {key} must be a whole number, not {value!r}", key=key)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidConfig(f"{self.file}: {key} must be a number, not {value!r}", key=key)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidConfig(f"{self.file}: {key} must be true or false, not {value!r}", key=key)
        return value
