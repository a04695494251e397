"""The Triton backend serves the toy model: the reference's tokens, in any chunks, from a pool of NaN."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.attention import TorchPagedAttention
from engine.batch import build_batch
from engine.kernels.attention import TritonPagedAttention
from engine.kernels.kv_write import Rotation
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan
from tests.kernels.pages import SMALL, assert_close
from tests.oracle import make_toy_checkpoint, oracle_logits

_BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), "qwen3")


def start(config: ModelConfig, num_tokens: int, free: list[int], draw: random.Random) -> Sequence:
    ids = tuple(draw.randrange(config.vocab_size) for _ in range(num_tokens))
    request = Request(RequestId("r"), ids, SamplingParams(max_tokens=1, seed=0))
    sequence = new_sequence(request, 0, (), 1000)
    sequence.block_table = [free.pop() for _ in range(-(-num_tokens // _BLOCK_SIZE))]
    return sequence


def test_logits_are_the_references_in_chunks_decodes_and_drafts(folder: Path, device: torch.device) -> None:
    config = ModelConfig.from_folder(folder)
    model = Transformer.load(folder, config, device=device)
    shape = (config.num_layers, 2, 60, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    backend = TritonPagedAttention(torch.full(shape, math.nan, device=device), config.num_heads)
    draw = random.Random(1)
    free = list(range(60))
    draw.shuffle(free)
    sequences = [start(config, num_tokens, free, draw) for num_tokens in (45, 1, 17)]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while work := [
        (index, min(draw.choice([1, 3, 8, 9, 20]), sequence.num_uncomputed_tokens))
        for index, sequence in enumerate(sequences)
        if sequence.num_uncomputed_tokens
    ]:
        items = tuple(ScheduledSequence(sequences[index], count) for index, count in work)
        batch = build_batch(StepPlan(items), _BLOCK_SIZE)
        hidden = model.forward(batch.token_ids.to(device), batch.positions.to(device), backend.plan(batch))
        logits = model.logits(hidden).cpu()
        for (index, count), row in zip(work, batch.rows_by_plan().tolist(), strict=True):
            first = int(batch.starts[row])
            found[index].append(logits[first : first + count])
            sequences[index].num_computed_tokens += count
    for sequence, parts in zip(sequences, found, strict=True):
        expected = oracle_logits(folder, sequence.token_ids)
        assert (torch.cat(parts) - expected).abs().max() < 1e-4


def test_fused_rotation_gives_what_separate_rotation_gives(folder: Path, device: torch.device) -> None:
    config = ModelConfig.from_folder(folder)
    shape = (1, 2, 20, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    draw = random.Random(2)
    sequence = start(config, 30, list(range(20)), draw)
    batch = build_batch(StepPlan((ScheduledSequence(sequence, 30),)), _BLOCK_SIZE)
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    heads = torch.randn(30, num_heads + 2 * num_kv_heads, config.head_dim)
    angles = torch.randn(30, config.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    weight = torch.rand(config.head_dim) + 0.5

    qk = heads[:, : num_heads + num_kv_heads].double()
    qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + 1e-6) * weight
    first, second = qk.chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    qk = torch.cat((first * c - second * s, second * c + first * s), dim=-1).float()
    plain = TorchPagedAttention(torch.full(shape, math.nan), num_heads).plan(batch)
    v = heads[:, num_heads + num_kv_heads :]
    expected = plain.run(0, qk[:, :num_heads], qk[:, num_heads:], v)

    heads = heads.to(device)
    pool = torch.full(shape, math.nan, device=device)
    step = TritonPagedAttention(pool, num_heads, tiles=SMALL).plan(batch)
    weight = weight.to(device)
    actual = step.run_rotated(
        0,
        heads[:, :num_heads],
        heads[:, num_heads : num_heads + num_kv_heads],
        heads[:, num_heads + num_kv_heads :],
        Rotation(cos.to(device), sin.to(device), weight, weight, 1e-6),
    )
    assert_close(actual.cpu(), expected)


def test_a_pool_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.attention.is_interpreted", lambda _: False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        TritonPagedAttention(torch.zeros(1, 2, 3, 1, 16, 16), 1)
