"""The decoder gives the logits of transformers for each architecture, head and rope kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.model.config import ModelConfig
from engine.model.linear import Linear, PackedLinear, PlainLinear, can_pack
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from tests.oracle import ABSENT, ROPE_KINDS, edit_config, make_toy_checkpoint, oracle_logits

_TOLERANCE = 1e-4
_IDS = [(7 * i * i + 3 * i + 11) % 512 for i in range(200)]


class WholePrompt:
    """Attention of one whole prompt without a pool, to test the layers alone."""

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits_of(model: Transformer, ids: list[int]) -> torch.Tensor:
    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), WholePrompt())
    return model.logits(hidden)


def assert_matches(folder: Path, ids: list[int] = _IDS) -> None:
    model = Transformer.load(folder, ModelConfig.from_folder(folder))
    logits = logits_of(model, ids)
    assert logits.dtype == torch.float32
    assert (logits - oracle_logits(folder, ids)).abs().max() < _TOLERANCE


@pytest.mark.parametrize("rope", ROPE_KINDS)
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_the_reference(tmp_path: Path, arch: str, rope: str) -> None:
    assert_matches(make_toy_checkpoint(tmp_path, arch, rope=rope))


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_older_rope_spellings_give_the_same_numbers(tmp_path: Path, rope: str, spelling: str) -> None:
    assert_matches(make_toy_checkpoint(tmp_path, rope=rope, rope_spelling=spelling))


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 32}),
        ("qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("mistral", {"sliding_window": 256}),
    ],
    ids=str,
)
def test_switches_of_the_configuration_are_honoured(
    tmp_path: Path, arch: str, overrides: dict[str, Any]
) -> None:
    assert_matches(make_toy_checkpoint(tmp_path, arch, **overrides))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 120])
def test_linear_scaling_holds_up_to_its_stretched_context(tmp_path: Path, num_tokens: int) -> None:
    make_toy_checkpoint(tmp_path, rope="linear", max_position_embeddings=64)
    assert_matches(tmp_path, _IDS[:num_tokens])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_are_computed_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_matches(make_toy_checkpoint(tmp_path, dtype=dtype))


def test_an_absent_tie_key_means_an_own_head(tmp_path: Path) -> None:
    make_toy_checkpoint(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=ABSENT)
    assert_matches(tmp_path)


def test_a_tied_model_uses_the_embedding_even_when_a_head_is_stored(tmp_path: Path) -> None:
    make_toy_checkpoint(tmp_path)  # its head is another random matrix
    edit_config(tmp_path, tie_word_embeddings=True)
    config = ModelConfig.from_folder(tmp_path)
    weights = dict(load_weights(tmp_path, config))
    hidden = torch.randn(3, 64)
    expected = F.linear(
        F.rms_norm(hidden, (64,), weights["norm.weight"], 1e-5), weights["embed_tokens.weight"]
    )
    logits = Transformer.load(tmp_path, config).logits(hidden)
    assert (logits - expected).abs().max() < _TOLERANCE


def test_logits_are_computed_for_the_asked_rows_only(tmp_path: Path) -> None:
    make_toy_checkpoint(tmp_path)
    model = Transformer.load(tmp_path, ModelConfig.from_folder(tmp_path))
    hidden = model.forward(torch.tensor(_IDS), torch.arange(len(_IDS)), WholePrompt())
    rows = model.logits(hidden[[199, 3]])
    assert rows.shape == (2, 512)
    assert (rows - model.logits(hidden)[[199, 3]]).abs().max() < _TOLERANCE


@pytest.mark.skipif(not can_pack(), reason="this torch has no packed fp32 product")
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_and_plain_layers_agree(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 40, generator=generator)
    bias = torch.randn(96, generator=generator) if has_bias else None
    x = torch.randn(num_rows, 40, generator=generator)
    layers: list[Linear] = [PlainLinear(weight, bias), PackedLinear(weight, bias)]
    plain, packed = (layer(x) for layer in layers)
    assert (plain - packed).abs().max() < 1e-4
