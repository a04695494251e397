"""Tensors of a checkpoint: found under every common name, and never missing or left over in silence."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import InvalidConfig
from engine.model.config import ModelConfig
from engine.model.weights import Weights, load_weights
from tests.oracle import edit_config, make_toy_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: Path) -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def assert_same(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_names_may_lack_the_model_prefix(folder: Path, original: Path) -> None:
    store(folder, {name.removeprefix("model."): tensor for name, tensor in stored(folder).items()})
    assert_same(load(folder), load(original))


def test_shards_with_an_index_are_one_checkpoint(folder: Path, original: Path) -> None:
    tensors = stored(folder)
    (folder / "model.safetensors").unlink()
    shard_of = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(shard_of.values()):
        save_file({name: tensors[name] for name in tensors if shard_of[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shard_of}))
    assert_same(load(folder), load(original))
    index.write_text(json.dumps({"weight_map": {**shard_of, "model.extra": min(shard_of.values())}}))
    with pytest.raises(InvalidConfig, match="extra"):
        load(folder)
    index.write_text(json.dumps({"weight_map": shard_of}))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidConfig, match="model-00002-of-00002"):
        load(folder)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd"])
def test_an_index_cannot_name_files_outside_its_folder(folder: Path, shard: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InvalidConfig, match="outside its folder"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_stored_precision_becomes_fp32(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in stored(folder).items()}
    store(folder, tensors)
    for name, tensor in load(folder).items():
        source = tensors.get(f"model.{name}", tensors.get(name))
        assert source is not None
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, source.to(torch.float32))


def test_integer_weights_are_refused_by_name(folder: Path) -> None:
    tensors = stored(folder)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)
    store(folder, tensors)
    with pytest.raises(InvalidConfig, match=r"layers\.1\.mlp\.up_proj\.weight is stored as I8"):
        load(folder)


def test_missing_unexpected_and_misshapen_tensors_are_listed(folder: Path) -> None:
    tensors = stored(folder)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(63)
    store(folder, tensors)
    with pytest.raises(InvalidConfig) as caught:
        load(folder)
    for text in (
        "missing: layers.0.mlp.up_proj.weight",
        "unexpected: layers.0.mlp.extra.weight",
        "norm.weight [63]",
    ):
        assert text in caught.value.message


def test_bias_tensors_without_their_flag_stop_the_start(tmp_path: Path) -> None:
    make_toy_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    load(tmp_path)
    edit_config(tmp_path, mlp_bias=False)
    with pytest.raises(InvalidConfig, match=r"6 tensors unexpected: layers\.0\.mlp\.down_proj\.bias"):
        load(tmp_path)


def test_rotary_buffers_of_old_exporters_are_ignored(folder: Path, original: Path) -> None:
    store(folder, {**stored(folder), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_same(load(folder), load(original))


def test_an_untied_model_without_a_head_is_refused_by_its_name(folder: Path) -> None:
    tensors = stored(folder)
    del tensors["lm_head.weight"]
    store(folder, tensors)
    with pytest.raises(InvalidConfig, match=r"lm_head\.weight"):
        load(folder)


def test_an_extra_head_of_a_tied_model_is_said_to_be_unused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        assert "lm_head.weight" not in load(folder)
    assert "lm_head.weight is not used" in caplog.text


def test_folders_without_safetensors_and_broken_files_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(InvalidConfig, match=r"model\.safetensors is not a readable"):
        load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidConfig, match="only the safetensors format"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InvalidConfig, match=r"model\.safetensors"):
        load(folder)
