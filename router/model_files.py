"""Reading the JSON files of a model folder for the router: what is there, or an error that names the file.

Owns no meaning of the contents. Used at start only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import InvalidConfig


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; an absent file is an empty object. Raises InvalidConfig naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read {path.name} of the model: {error}", key=path.name) from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidConfig(f"{path.name} of the model is not valid JSON: {error}", key=path.name) from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path.name} of the model must hold an object", key=path.name)
    return found


def token_text(value: Any) -> str | None:
    """The text of a token that is given as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
