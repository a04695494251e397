"""End-of-sequence ids: everything in a checkpoint that says where an answer ends.

`config.json` and `generation_config.json` give ids, the tokenizer files give the text of a token. Checkpoints
disagree with themselves, and an id that is missed means answers that never end, so the union counts. Used at
start, any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.errors import InvalidConfig
from engine.model.checkpoint_json import Section, read_json
from engine.model.generation import GENERATION_FILE


def eos_token_ids(path: Path, config: Section, default: int | None, vocab_size: int) -> frozenset[int]:
    """The union of the folder's end-of-sequence ids; `default` (the architecture's) if none is named.

    Ids outside the vocabulary can never be sampled and are left out. Raises InvalidConfig for a value of the
    wrong type.
    """
    generation = read_json(path / GENERATION_FILE, is_required=False)
    found = _ids(config.values.get("eos_token_id"), config.file)
    found |= _ids(generation.get("eos_token_id"), GENERATION_FILE)
    found |= _tokenizer_eos(path)
    if not found and default is not None:
        found = {default}
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)


def _ids(value: Any, file: str) -> set[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidConfig(
                f"{file}: eos_token_id must be an id or a list of ids, not {value!r}", key="eos_token_id"
            )
    return set(values)


def _tokenizer_eos(path: Path) -> set[int]:
    """The id of the `eos_token` that the tokenizer's configuration names, if it can be found."""
    tokenizer_config = read_json(path / "tokenizer_config.json", is_required=False)
    token = tokenizer_config.get("eos_token")
    if token is None:
        token = read_json(path / "special_tokens_map.json", is_required=False).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return set()
    for token_id, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal():
            return {int(token_id)}
    tokenizer = read_json(path / "tokenizer.json", is_required=False)
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == text:
            return {int(entry["id"])}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        return {int(vocabulary[text])}
    return set()
