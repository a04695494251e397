"""The bundled model: converted once, only ever seen whole, with the reference's ids and logits."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.model.bundled import prepare_bundled_model
from engine.model.config import ModelConfig
from engine.model.gguf_convert import BLOCKS_FILE
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from engine.native.build import NativeUnavailable
from engine.native.linear import NativeLinears
from engine.native.operators import load_ops
from engine.native.packed_store import PrivateStore
from engine.runner import ModelRunner
from engine.sequence import new_sequence
from engine.step import ScheduledSequence, StepPlan
from tests.oracle import oracle_logits


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)  # 0.6 GB that pytest would keep for three runs


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(cache))


@pytest.fixture
def folder() -> Path:
    return prepare_bundled_model()


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prepare(sender: multiprocessing.connection.Connection, stops_at: float) -> None:
    def progress(what: str, fraction: float) -> None:
        sender.send((what, fraction))
        if fraction >= stops_at:
            threading.Event().wait()

    sender.send(str(prepare_bundled_model(progress)))


def _start(
    stops_at: float = 2.0,
) -> tuple[multiprocessing.process.BaseProcess, multiprocessing.connection.Connection]:
    """A process that converts and tells; it goes no further than a progress of `stops_at`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_prepare, args=(sender, stops_at), daemon=True)
    process.start()
    sender.close()
    return process, receiver


@pytest.mark.timeout(240)  # three starts of a process and a conversion
def test_a_killed_conversion_is_never_used_and_two_at_once_convert_once(cache: Path) -> None:
    folder = cache / "models" / "smollm2-135m-instruct"
    killed, reports = _start(stops_at=0.9)
    while reports.recv()[1] < 0.9:
        assert not folder.exists()
    assert not folder.exists()
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert not folder.exists()
    pairs = [_start(), _start()]
    heard: list[list[object]] = [[], []]
    for (process, receiver), words in zip(pairs, heard, strict=True):
        while not words or not isinstance(words[-1], str):
            words.append(receiver.recv())
        process.join()
    assert heard[0][-1] == heard[1][-1] == str(folder)
    converted = [sum(isinstance(word, tuple) and word[1] > 0 for word in words) > 0 for words in heard]
    assert sorted(converted) == [False, True]
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        ".smollm2-135m-instruct.lock",
        "smollm2-135m-instruct",
    ]


def test_a_prepared_model_is_found_at_once(folder: Path) -> None:
    started = time.monotonic()
    assert prepare_bundled_model() == folder
    assert time.monotonic() - started < 1.0


def test_a_damaged_folder_is_made_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    damaged = tmp_path / "models" / folder.name
    shutil.copytree(folder, damaged, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("model.safetensors", BLOCKS_FILE):
        (damaged / name).write_bytes(b"cut short")
    assert prepare_bundled_model() == damaged
    assert (damaged / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "models")


def test_the_shape_is_that_of_smollm2(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rope.theta, config.rms_norm_eps, config.max_context) == (100000.0, 1e-5, 8192)
    assert config.is_head_tied
    assert config.eos_token_ids == {2}


_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    " Paris": [7042],
    "\n": [198],
    " ": [216],
    " ".join(["hello"] * 8): [28120] + [33662] * 7,
    "DEFGHIJ": [33203, 23960, 57, 58],
    "😀": [10813, 242, 218],
    "🫠": [10813, 121, 250],
    "🦙": [10813, 116, 243],
    "龜": [180, 139, 246],
    "日本語": [23274, 115, 40993, 179, 120, 248],
    "12345": [33, 34, 35, 36, 37],
    "a    b": [81, 333, 278],
    "a\r\nb": [81, 201, 198, 82],
    "a\n\n\nb": [81, 1116, 198, 82],
    "def f(x):\n    return x\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 198],
}
_LENGTHS = {"3.14": 4, "👨‍👩‍👧": 13, "Café déjà vu — 123": 13, "I'm I'll we've": 6, "x" * 50: 13}


def test_the_tokenizer_gives_the_original_ids(tokenizer: Tokenizer) -> None:
    assert {text: tokenizer.encode(text).ids for text in _IDS} == _IDS
    assert {text: len(tokenizer.encode(text).ids) for text in _LENGTHS} == _LENGTHS


@pytest.mark.parametrize("text", [*_IDS, *_LENGTHS, "a\x00b", "<|im_start|>x<|im_end|>"])
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_no_text_when_skipped_and_no_spaces_otherwise(tokenizer: Tokenizer) -> None:
    specials = list(range(17))
    assert tokenizer.decode(specials) == ""
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<|im_start|><repo_name><|im_end|>"


def test_transformers_reads_the_same_tokenizer(folder: Path) -> None:
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert {text: reference.encode(text) for text in _IDS} == _IDS
    turns = [{"role": "user", "content": "hi"}]
    template = {"tokenize": False, "add_generation_prompt": True}
    assert len(reference.encode(reference.apply_chat_template(turns, **template))) == 31
    brief = [{"role": "system", "content": "Be brief."}, *turns]
    assert len(reference.encode(reference.apply_chat_template(brief, **template))) == 18
    assert (reference.eos_token_id, reference.bos_token_id, reference.pad_token_id) == (2, 1, 2)


class _WholePrompt:
    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def test_logits_equal_the_reference_and_the_model_knows_paris(folder: Path, tokenizer: Tokenizer) -> None:
    model = Transformer.load(folder, ModelConfig.from_folder(folder))
    ids = tokenizer.encode("The capital of Italy is Rome. The capital of France is").ids
    logits = model.logits(model.forward(torch.tensor(ids), torch.arange(len(ids)), _WholePrompt()))
    assert (logits - oracle_logits(folder, ids)).abs().max() < 1e-3
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


def test_the_kept_blocks_are_the_same_weights(folder: Path) -> None:
    blocks, weights = load_file(folder / BLOCKS_FILE), load_file(folder / "model.safetensors")
    quantized = [name for name in weights if f"{name}.q" in blocks]
    assert len(quantized) == 30 * 7 + 1
    for name in [*quantized[:8], *quantized[-3:]]:
        q, scale = blocks[f"{name}.q"], blocks[f"{name}.scale"].astype(np.float32)[..., None]
        if f"{name}.min" in blocks:
            low_then_high = np.concatenate([q & 15, q >> 4], axis=-1)
            values = low_then_high * scale + blocks[f"{name}.min"].astype(np.float32)[..., None]
        else:
            values = q * scale
        assert np.array_equal(values.reshape(weights[name].shape), weights[name]), name


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_runner_gives_the_references_tokens_and_logprobs(
    folder: Path, tokenizer: Tokenizer, kernels: Literal["torch", "native"]
) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog asks why. " * 14
    prompt = tokenizer.encode(text + "The capital of France is").ids
    if kernels == "native":
        skip_without_native_ops()
    runner = ModelRunner.load(EngineConfig(model=str(folder), num_kv_blocks=64, cpu_kernels=kernels))
    sampling = SamplingParams(max_tokens=12, seed=0, temperature=0.0, prompt_logprobs=0)
    request = Request(RequestId("r"), tuple(prompt), sampling)
    sequence = new_sequence(request, 0, (), runner.max_context)
    assert runner.cache.try_start(sequence, num_extra_tokens=12)
    gaps: list[float] = []
    while sequence.num_output_tokens < 12:
        num_tokens = min(64, sequence.num_uncomputed_tokens)
        output = runner.run(StepPlan((ScheduledSequence(sequence, num_tokens),)))
        sequence.num_computed_tokens += num_tokens
        sequence.prompt_logprobs += output.prompt_logprobs[0]
        for sampled in output.sampled[0]:
            sequence.append(sampled.token_id)
            gaps.append(sampled.gap)
    expected = oracle_logits(folder, sequence.token_ids[:-1])
    logprobs = torch.log_softmax(expected, dim=-1)
    for row, entry in zip(logprobs, sequence.prompt_logprobs, strict=False):
        assert abs(float(row[entry.token_id]) - entry.logprob) < 1e-3
    assert len(sequence.prompt_logprobs) == len(prompt) - 1
    best = expected[len(prompt) - 1 :].argmax(dim=-1).tolist()
    for token_id, wanted, gap in zip(sequence.output_token_ids, best, gaps, strict=True):
        assert token_id == wanted or gap < 1e-3


def test_native_layers_multiply_the_blocks_and_give_the_same_values(folder: Path) -> None:
    skip_without_native_ops()
    weights = load_weights(folder, ModelConfig.from_folder(folder), keeps_half=True)
    linears = NativeLinears(load_ops(), weights, folder, PrivateStore())
    for names in (
        ["layers.3.self_attn.q_proj", "layers.3.self_attn.k_proj", "layers.3.self_attn.v_proj"],
        ["layers.29.mlp.down_proj"],
        ["embed_tokens"],
    ):
        weight = torch.cat([weights[f"{name}.weight"] for name in names])[:2000]
        layer = linears(names)
        columns = layer(torch.eye(weight.shape[1]))  # each product is 1 · value + 0 …: exact
        assert torch.equal(columns[:, :2000].T, weight)
    assert linears.num_bytes < 35e6


def skip_without_native_ops() -> None:
    try:
        load_ops()
    except NativeUnavailable as error:
        pytest.skip(str(error))


def test_a_repository_that_cannot_be_reached_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "from core.errors import InvalidConfig\n"
        "from engine.model.source import resolve_model\n"
        "try:\n    resolve_model('nobody/nothing')\n"
        "except InvalidConfig as error:\n    print(error.message)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "nobody/nothing is no folder here and the hub did not give it" in done.stdout
