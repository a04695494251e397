"""What a checkpoint folder says, and what of it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidConfig
from engine.model.config import ModelConfig
from engine.model.generation import GenerationDefaults
from engine.model.rope_config import RopeConfig
from tests.oracle import ABSENT, edit_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA))
    return tmp_path


def read(folder: Path, **changes: Any) -> ModelConfig:
    edit_config(folder, **changes)
    return ModelConfig.from_folder(folder)


def test_absent_keys_take_the_defaults_of_llama(folder: Path) -> None:
    config = read(folder)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0)
    switches = (config.is_head_tied, config.has_qkv_bias, config.has_mlp_bias, config.has_qk_norm)
    assert not any(switches)


def test_qwen2_has_qkv_bias_without_a_flag_and_ignores_attention_bias(folder: Path) -> None:
    config = read(folder, architectures=["Qwen2ForCausalLM"], attention_bias=True)
    assert config.has_qkv_bias
    assert not config.has_output_bias


def test_qwen3_has_qk_norm_and_its_own_head_size(folder: Path) -> None:
    config = read(folder, architectures=["Qwen3ForCausalLM"])
    assert config.has_qk_norm
    assert config.head_dim == 128


def test_the_model_type_stands_in_for_absent_architectures(folder: Path) -> None:
    assert read(folder, architectures=ABSENT, model_type="qwen3").architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ABSENT, "model_type": "gemma3"}, "gemma3"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}, "sliding_window 4096"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": ABSENT}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 15}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_computed_right_is_refused_by_name(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=named):
        read(folder, **changes)


def test_mistral_is_accepted_when_its_window_covers_the_context(folder: Path) -> None:
    read(folder, architectures=["MistralForCausalLM"], sliding_window=None, num_key_value_heads=2)
    read(folder, sliding_window=64)


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "fields"), [("linear", {"factor": 2.0}), ("llama3", _LLAMA3), ("default", {})]
)
def test_all_spellings_of_a_rope_kind_mean_the_same(folder: Path, kind: str, fields: dict[str, Any]) -> None:
    newer = read(folder, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **fields})
    edit_config(folder, rope_parameters=ABSENT)
    by_rope_type = read(folder, rope_theta=5e5, rope_scaling={"rope_type": kind, **fields})
    by_type = read(folder, rope_theta=5e5, rope_scaling={"type": kind, **fields})
    assert newer == by_rope_type == by_type
    assert (newer.rope.kind, newer.rope.theta) == (kind, 5e5)


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"rope_type": "foo", "factor": 2.0}, "foo"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "yarn", "factor": 4.0}, "yarn"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": None}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"factor": 2.0}, "names no kind"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq",
        ),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_unknown_or_incomplete_rope_is_refused_by_name(
    folder: Path, key: str, block: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=named):
        read(folder, **{key: block})


def test_linear_scaling_stretches_the_context_and_llama3_states_it(folder: Path) -> None:
    assert read(folder).max_context == 64
    assert read(folder, rope_scaling={"type": "linear", "factor": 2.0}).max_context == 128
    assert read(folder, rope_scaling={"rope_type": "llama3", **_LLAMA3}).max_context == 64


def test_eos_ids_are_the_union_of_all_files_that_name_one(folder: Path) -> None:
    edit_config(folder, "generation_config.json", eos_token_id=[0, 7])
    edit_config(
        folder,
        "tokenizer_config.json",
        eos_token={"content": "<end>"},
        added_tokens_decoder={"9": {"content": "<end>"}},
    )
    assert read(folder, eos_token_id=[2]).eos_token_ids == {0, 2, 7, 9}


def test_the_tokenizers_eos_is_found_in_its_vocabulary_too(folder: Path) -> None:
    edit_config(folder, "tokenizer_config.json", eos_token="</s>")
    edit_config(folder, "tokenizer.json", added_tokens=[], model={"vocab": {"</s>": 5}})
    assert read(folder).eos_token_ids == {2, 5}


def test_the_architectures_eos_counts_only_when_nothing_names_one(folder: Path) -> None:
    assert read(folder, eos_token_id=ABSENT).eos_token_ids == {2}
    assert read(folder, architectures=["Qwen2ForCausalLM"]).eos_token_ids == frozenset()
    edit_config(folder, "generation_config.json", eos_token_id=3)
    assert read(folder, architectures=["LlamaForCausalLM"]).eos_token_ids == {3}


def test_an_eos_id_outside_the_vocabulary_is_left_out(folder: Path) -> None:
    assert read(folder, eos_token_id=[2, 512]).eos_token_ids == {2}


def test_generation_defaults_are_none_unless_stated(folder: Path) -> None:
    assert read(folder).generation == GenerationDefaults()
    edit_config(
        folder, "generation_config.json", temperature=0.6, top_p=0.9, repetition_penalty=1.3, top_k=None
    )
    assert read(folder).generation == GenerationDefaults(temperature=0.6, top_p=0.9, repetition_penalty=1.3)


def test_the_digest_names_what_keys_and_values_depend_on(folder: Path) -> None:
    original = read(folder).digest
    assert read(folder, eos_token_id=[3]).digest == original
    assert read(folder, rope_theta=20000.0).digest != original
    assert read(folder, rope_theta=10000.0).digest == original
    (folder / "model.safetensors").write_bytes(b"weights")
    assert read(folder).digest != original


def test_a_copy_of_the_folder_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    assert ModelConfig.from_folder(copy).digest == ModelConfig.from_folder(folder).digest


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_broken_config_file_is_refused_by_name(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        ModelConfig.from_folder(folder)


def test_a_missing_folder_or_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="nowhere"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidConfig, match=r"config\.json is missing"):
        ModelConfig.from_folder(tmp_path)
