"""Rotary position embedding: which kind a checkpoint uses, in all spellings, and how far it reaches.

Owns the parsing of `rope_scaling` (with `type` or `rope_type`) and of the newer `rope_parameters` block. The
tables are made in `rope.py`. Used at start, from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.errors import InvalidConfig
from engine.model.checkpoint_json import Section

_SUPPORTED = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """`kind` is `default`, `linear` or `llama3`; the fields after `factor` are used by `llama3` only."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0

    def max_context(self, max_position_embeddings: int) -> int:
        """Positions the model was made for.

        Linear scaling stretches the trained positions, and `max_position_embeddings` is by convention still
        the trained number, so the context is the product. Llama 3 checkpoints state the stretched number
        themselves.
        """
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        return max_position_embeddings


def parse_rope(config: Section, max_position_embeddings: int) -> RopeConfig:
    """Read the rope settings of a `config.json`.

    Raises InvalidConfig by name for an unknown kind, a missing or impossible factor, and for partial
    rotation.
    """
    block = _block(config)
    where = Section(block, f"{config.file}: rope")
    theta = where.optional_number("rope_theta")
    if theta is None:
        theta = config.number("rope_theta", 10000.0)
    if theta <= 0:
        raise InvalidConfig(f"{config.file}: rope_theta must be positive, not {theta}", key="rope_theta")
    for source in (where, config):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise InvalidConfig(
                f"{config.file}: partial_rotary_factor is not supported", key="partial_rotary_factor"
            )
    kind = _kind(block, config.file)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _positive(where, "factor", kind)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low = _positive(where, "low_freq_factor", kind)
    high = _positive(where, "high_freq_factor", kind)
    if high <= low:
        raise InvalidConfig(
            f"{config.file}: rope llama3 needs high_freq_factor ({high}) above low_freq_factor ({low})",
            key="high_freq_factor",
        )
    original = where.positive_int("original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(theta, kind, factor, low, high, original)


def _block(config: Section) -> dict[str, Any]:
    """The one block that counts. transformers lets `rope_scaling` win when both are present; so do we."""
    for key in ("rope_scaling", "rope_parameters"):
        block = config.values.get(key)
        if not block:
            continue
        if not isinstance(block, dict):
            raise InvalidConfig(f"{config.file}: {key} must be an object, not {block!r}", key=key)
        if any(isinstance(value, dict) for value in block.values()):
            raise InvalidConfig(f"{config.file}: {key} per layer type is not supported", key=key)
        return block
    return {}


def _kind(block: dict[str, Any], file: str) -> str:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind not in _SUPPORTED:
        raise InvalidConfig(
            f"{file}: rope scaling kind {kind!r} is not supported; supported are {', '.join(_SUPPORTED)}",
            key="rope_type",
        )
    if kind == "default" and "factor" in block and "rope_type" not in block and "type" not in block:
        raise InvalidConfig(f"{file}: rope scaling has a factor but names no kind", key="rope_type")
    return str(kind)


def _positive(where: Section, key: str, kind: str) -> float:
    value = where.optional_number(key)
    if value is None:
        raise InvalidConfig(f"{where.file} scaling of kind {kind} needs {key}", key=key)
    if value <= 0:
        raise InvalidConfig(f"{where.file} scaling: {key} must be positive, not {value}", key=key)
    return value
