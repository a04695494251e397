"""ServedModel: what the router knows of the model it serves: its name, tokenizer, template, limits and
defaults.

Owns reading the model folder's `config.json` and `generation_config.json` as far as text and validation need
it; the engine reads them for itself. Immutable after loading.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import InvalidConfig, UnknownModel
from router.chat_template import ChatTemplate
from router.model_files import read_json_object
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a setting out gets. The class's own defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ServedModel:
    """One model. `vocab_size` bounds token ids; `max_context` is None if the folder does not say it."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    max_context: int | None
    defaults: SamplingDefaults = SamplingDefaults()
    created: int = field(default_factory=lambda: int(time.time()))

    def is_asked(self, body: Any) -> bool:
        """Whether a body names this model; one without a name is for the schema to refuse. Raises
        UnknownModel for the name of another.
        """
        name = body.get("model") if isinstance(body, dict) else None
        if isinstance(name, str) and name != self.name:
            raise UnknownModel(f"the model {name[:100]!r} does not exist", param="model")
        return isinstance(name, str)

    @classmethod
    def load(cls, folder: Path, name: str | None = None) -> ServedModel:
        """Read a model folder in Hugging Face format. Raises InvalidConfig naming the file and the key."""
        tokenizer = Tokenizer.load(folder)
        config = read_json_object(folder / "config.json")
        return cls(
            name=name or folder.resolve().name,
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_folder(folder, tokenizer.named_tokens),
            vocab_size=_count(config, "vocab_size") or tokenizer.vocab_size,
            max_context=_count(config, "max_position_embeddings"),
            defaults=_defaults(read_json_object(folder / "generation_config.json")),
        )


def _count(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfig(f"config.json: {key} is {value!r}, but must be a positive number", key=key)
    return value


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """The sampling part of generation_config.json, within the limits that requests have."""
    found: dict[str, Any] = {}
    for key, (low, high) in _RANGES.items():
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise InvalidConfig(
                f"generation_config.json: {key} is {value!r}, but must lie in [{low}, {high}]", key=key
            )
        found[key] = int(value) if key == "top_k" else float(value)
    return SamplingDefaults(**found)
