"""GenerationDefaults: the sampling settings a checkpoint recommends.

Owns their reading only; whether they apply to a request that leaves them out is the router's documented
choice. Used at start, from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.model.checkpoint_json import Section, read_json

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling part of `generation_config.json`; `None` where the file (or the key) is absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, path: Path) -> GenerationDefaults:
        """Read the folder's file, if any. Raises InvalidConfig for a value of the wrong type."""
        raw = Section(read_json(path / GENERATION_FILE, is_required=False), GENERATION_FILE)
        return cls(
            temperature=raw.optional_number("temperature"),
            top_p=raw.optional_number("top_p"),
            top_k=raw.optional_int("top_k"),
            min_p=raw.optional_number("min_p"),
            repetition_penalty=raw.optional_number("repetition_penalty"),
        )
