"""Any config.json is read: parameters and KV of public models come out as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.planner.model_config import model_shape, read_model_shape
from core.errors import InvalidConfig
from tests.unit.cluster.planner.model_configs import (
    DEEPSEEK_V3,
    GPT2,
    GPT_OSS_20B,
    LLAMA_3_70B,
    LLAMA_4_MAVERICK,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
)


@pytest.mark.parametrize(
    ("raw", "kind", "total_b", "active_b"),
    [
        (LLAMA_3_70B, "GQA", 70.55, 69.50),
        (MIXTRAL_8X7B, "GQA, mixture of 8 experts", 46.70, 12.75),
        (QWEN3_30B_A3B, "GQA, mixture of 128 experts", 30.53, 3.04),
        (DEEPSEEK_V3, "MLA, mixture of 256 experts", 671.0, 36.6),
        (GPT_OSS_20B, "GQA, mixture of 32 experts", 20.91, 3.61),
        (GPT2, "MHA", 0.1236, 0.1236),
        (LLAMA_4_MAVERICK, "GQA, mixture of 128 experts", 400.7, 16.1),
    ],
    ids=["llama-3-70b", "mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss", "gpt2", "llama-4"],
)
def test_parameters_come_out_as_published(
    raw: dict[str, Any], kind: str, total_b: float, active_b: float
) -> None:
    """Active ones without the input table, which is looked up and not multiplied with."""
    shape = model_shape(raw, "model")
    assert shape.kind == kind
    assert shape.num_params / 1e9 == pytest.approx(total_b, rel=0.006)
    assert shape.num_active_params / 1e9 == pytest.approx(active_b, rel=0.006)


def test_latent_attention_keeps_the_latent_and_the_rope_key_only() -> None:
    assert model_shape(DEEPSEEK_V3, "v3").kv_bytes_per_token == 61 * (512 + 64) * 2


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    shape = model_shape(GPT_OSS_20B, "oss")
    per_layer = 2 * 8 * 64 * 2
    assert shape.kv_bytes(8192) == 12 * per_layer * (8192 + 128)


def test_a_step_of_a_mixture_reads_the_experts_that_its_tokens_draw() -> None:
    shape = model_shape(MIXTRAL_8X7B, "mixtral")
    assert shape.bytes_read(1) == pytest.approx(shape.num_active_params * 2)
    assert shape.bytes_read(512) == pytest.approx((shape.num_params - shape.embedding) * 2)


def test_bits_per_weight_come_from_the_quantization() -> None:
    assert model_shape(DEEPSEEK_V3, "v3").weight_bits == 8
    awq = LLAMA_3_70B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    assert model_shape(awq, "awq").weight_bits == 4
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    packed = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert model_shape(LLAMA_3_70B | {"quantization_config": packed}, "packed").weight_bits == 8
    loaded = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    assert model_shape(LLAMA_3_70B | {"quantization_config": loaded}, "loaded").weight_bits == 4


def test_bits_that_are_given_need_not_be_known_from_the_file() -> None:
    novel = LLAMA_3_70B | {"quantization_config": {"quant_method": "novel"}, "torch_dtype": "posit16"}
    assert model_shape(novel, "novel", 4.0).weight_bits == 4


def test_a_text_model_inside_another_is_found_and_the_rest_is_named_as_left_out() -> None:
    shape = model_shape({"model_type": "vision", "text_config": LLAMA_3_70B}, "vision")
    assert shape.num_params / 1e9 == pytest.approx(70.55, rel=0.001)
    assert any("towers" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"] * 79}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 80}, "layer_types"),
        ({"torch_dtype": "posit16"}, "torch_dtype"),
        ({"quantization_config": {"quant_method": "novel"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_missing_or_not_understood_is_named(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidConfig, match=key):
        model_shape(LLAMA_3_70B | change, "model")


def test_a_folder_and_a_file_are_both_read(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_70B))
    assert read_model_shape(folder).name == "llama-3-70b"
    assert read_model_shape(folder / "config.json").num_layers == 80
    with pytest.raises(InvalidConfig, match=r"config\.json is missing"):
        read_model_shape(tmp_path)
