"""ModelConfig: what a checkpoint folder says about its model, in one vocabulary for all architectures.

Owns the reading of `config.json`, `generation_config.json` and the tokenizer's end-of-sequence token, with
the defaults of each architecture, and the refusal by name of everything that cannot be computed right. Does
not read weights (only samples of their bytes, for the digest) and imports no torch. Used at start, from any
thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from core.errors import InvalidConfig
from engine.model.checkpoint_json import Section, read_json
from engine.model.eos import eos_token_ids
from engine.model.fingerprint import weights_fingerprint
from engine.model.generation import GenerationDefaults
from engine.model.rope_config import RopeConfig, parse_rope


@dataclass(frozen=True)
class _Family:
    """What an absent key of `config.json` means for one architecture, and which parts its layers have."""

    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    eos_token_id: int | None = None
    has_qkv_bias: bool = False
    has_attention_bias_flag: bool = True
    has_mlp_bias_flag: bool = False
    has_qk_norm: bool = False
    default_sliding_window: int | None = None


FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(2048, eos_token_id=2, has_mlp_bias_flag=True),
        "MistralForCausalLM": _Family(
            131072, num_kv_heads=8, eos_token_id=2, has_attention_bias_flag=False, default_sliding_window=4096
        ),
        "Qwen2ForCausalLM": _Family(32768, has_qkv_bias=True, has_attention_bias_flag=False),
        "Qwen3ForCausalLM": _Family(32768, head_dim=128, has_qk_norm=True),
    }
)
_ARCHITECTURE_OF_TYPE = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model: sizes, switches, and what the checkpoint says of its use.

    `max_context` is the number of positions the model was made for (see `RopeConfig.max_context`).
    `eos_token_ids` is the union of what the configuration, the generation configuration and the tokenizer
    name.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    is_head_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    weights: str = ""

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Read a checkpoint folder in Hugging Face format.

        Raises InvalidConfig, naming the key, for a missing or malformed file, an architecture or a feature
        that is not supported, and for sizes that contradict each other.
        """
        if not path.is_dir():
            raise InvalidConfig(f"no checkpoint folder at {path}", key="model")
        raw = Section(read_json(path / "config.json"), "config.json")
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _refuse_unsupported(raw, family)
        num_heads = raw.positive_int("num_attention_heads")
        hidden_size = raw.positive_int("hidden_size")
        head_dim = raw.optional_int("head_dim") or family.head_dim or hidden_size // num_heads
        max_positions = raw.positive_int("max_position_embeddings", family.max_position_embeddings)
        rope = parse_rope(raw, max_positions)
        vocab_size = raw.positive_int("vocab_size")
        has_bias = family.has_attention_bias_flag and raw.boolean("attention_bias", False)
        config = cls(
            name=path.resolve().name,
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=raw.positive_int("intermediate_size"),
            num_layers=raw.positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(raw, family, num_heads),
            head_dim=head_dim,
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_context=rope.max_context(max_positions),
            is_head_tied=raw.boolean("tie_word_embeddings", False),
            has_qkv_bias=family.has_qkv_bias or has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=family.has_mlp_bias_flag and raw.boolean("mlp_bias", False),
            has_qk_norm=family.has_qk_norm,
            bos_token_id=raw.optional_int("bos_token_id"),
            eos_token_ids=eos_token_ids(path, raw, family.eos_token_id, vocab_size),
            generation=GenerationDefaults.from_folder(path),
            weights=weights_fingerprint(path),
        )
        config._check()
        return config

    @cached_property
    def digest(self) -> str:
        """16 hex digits that change with anything that changes a key or value vector: sizes, rope, weights.

        The folder's name, the sampling defaults and the end-of-sequence ids do not enter: two copies of one
        checkpoint may exchange KV blocks.
        """
        fields = dataclasses.asdict(self)
        for name in ("name", "bos_token_id", "eos_token_ids", "generation", "max_context"):
            del fields[name]
        text = "|".join(f"{key}={value!r}" for key, value in sorted(fields.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}",
                key="num_key_value_heads",
            )
        if self.head_dim % 2:
            raise InvalidConfig(f"config.json: head_dim {self.head_dim} must be even", key="head_dim")


def _architecture(raw: Section) -> str:
    names = raw.values.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        name = names[0]
    else:
        model_type = str(raw.values.get("model_type"))
        name = _ARCHITECTURE_OF_TYPE.get(model_type, model_type)
    if name not in FAMILIES:
        raise InvalidConfig(
            f"architecture {name} is not supported; supported are {', '.join(FAMILIES)}", key="architectures"
        )
    return name


def _num_kv_heads(raw: Section, family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" not in raw.values and family.num_kv_heads is not None:
        return family.num_kv_heads
    return raw.optional_int("num_key_value_heads") or num_heads


def _refuse_unsupported(raw: Section, family: _Family) -> None:
    """Refuse, by name, what would change the arithmetic in a way that is not built."""
    quantization = raw.values.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        )
        raise InvalidConfig(
            f"config.json: quantization_config (method {method}) is not supported", key="quantization_config"
        )
    activation = raw.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise InvalidConfig(
            f"config.json: hidden_act {activation!r} is not supported, only silu", key="hidden_act"
        )
    _refuse_sliding_window(raw.values, family)


def _refuse_sliding_window(values: Mapping[str, Any], family: _Family) -> None:
    kinds = values.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise InvalidConfig(
            f"config.json: layer_types {sorted(set(kinds))} are not supported, only full_attention",
            key="layer_types",
        )
    if family.default_sliding_window is not None:
        window = values.get("sliding_window", family.default_sliding_window)
        limit = values.get("max_position_embeddings", family.max_position_embeddings)
        if window is not None and window < limit:
            raise InvalidConfig(
                f"config.json: sliding_window {window} is not supported (null or the whole context is)",
                key="sliding_window",
            )
    elif values.get("use_sliding_window"):
        raise InvalidConfig("config.json: use_sliding_window true is not supported", key="use_sliding_window")
