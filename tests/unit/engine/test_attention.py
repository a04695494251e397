"""Paged attention gives the reference's logits, however a prompt is cut, placed and batched."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.attention import AttentionBackend, TorchPagedAttention
from engine.batch import build_batch
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.native.attention import NativePagedAttention
from engine.native.model import load_native
from engine.native.operators import load_ops
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan
from tests.oracle import make_toy_checkpoint, oracle_logits

_BLOCK_SIZE = 16
_NUM_BLOCKS = 160
_TOLERANCE = 1e-4


class Paged:
    """A toy model over a pool whose unwritten slots are NaN, with blocks dealt out at random."""

    def __init__(self, folder: Path, kernels: str, seed: int = 0) -> None:
        self.folder = folder
        self.config = ModelConfig.from_folder(folder)
        shape = (2, 2, _NUM_BLOCKS, self.config.num_kv_heads, _BLOCK_SIZE, self.config.head_dim)
        self.pool = torch.full(shape, math.nan)
        self.attention: AttentionBackend = TorchPagedAttention(self.pool, self.config.num_heads)
        if kernels == "torch":
            self.model = Transformer.load(folder, self.config)
        else:
            ops = load_ops()
            self.model, _ = load_native(folder, self.config, self.config.max_context, ops)
            self.attention = NativePagedAttention(ops, self.pool, self.config.num_heads)
        self.random = random.Random(seed)
        self.free = list(range(_NUM_BLOCKS))
        self.random.shuffle(self.free)

    def sequence(self, num_tokens: int) -> Sequence:
        ids = tuple(self.random.randrange(self.config.vocab_size) for _ in range(num_tokens))
        request = Request(RequestId("r"), ids, SamplingParams(max_tokens=1, seed=0))
        sequence = new_sequence(request, 0, (), 1000)
        sequence.block_table = [self.free.pop() for _ in range(-(-num_tokens // _BLOCK_SIZE))]
        return sequence

    def step(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Compute so many tokens of each; their logits `[num_new, vocab_size]`, in the order given."""
        plan = StepPlan(tuple(ScheduledSequence(sequence, num_new) for sequence, num_new in work))
        batch = build_batch(plan, _BLOCK_SIZE)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.attention.plan(batch))
        logits = self.model.logits(hidden)
        for sequence, num_new in work:
            sequence.num_computed_tokens += num_new
        ends = batch.starts + batch.num_new
        return [logits[batch.starts[row] : ends[row]] for row in batch.rows_by_plan()]

    def run(self, sequences: list[Sequence], next_chunk: Callable[[], int]) -> list[torch.Tensor]:
        """Compute all tokens, all sequences in each step; logits per sequence."""
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        while waiting := [i for i, sequence in enumerate(sequences) if sequence.num_uncomputed_tokens]:
            work = [(sequences[i], min(next_chunk(), sequences[i].num_uncomputed_tokens)) for i in waiting]
            for i, logits in zip(waiting, self.step(work), strict=True):
                found[i].append(logits)
        return [torch.cat(parts) for parts in found]

    def assert_matches(self, sequence: Sequence, logits: torch.Tensor) -> None:
        assert (logits - oracle_logits(self.folder, sequence.token_ids)).abs().max() < _TOLERANCE


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), request.param)


@pytest.mark.parametrize("chunk", [1, 4, 16, 17, 64, 200])
def test_a_prompt_gives_the_reference_logits_in_chunks_of_any_size(
    folder: Path, kernels: str, chunk: int
) -> None:
    paged = Paged(folder, kernels)
    sequence = paged.sequence(100)
    (logits,) = paged.run([sequence], lambda: chunk)
    paged.assert_matches(sequence, logits)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_lengths_around_a_block_border_are_right(folder: Path, kernels: str, num_tokens: int) -> None:
    paged = Paged(folder, kernels)
    sequence = paged.sequence(num_tokens)
    (logits,) = paged.run([sequence], lambda: 200)
    paged.assert_matches(sequence, logits)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_decodes_and_verified_drafts_mix_in_one_step(folder: Path, kernels: str, seed: int) -> None:
    paged = Paged(folder, kernels, seed)
    sequences = [paged.sequence(paged.random.randint(1, 200)) for _ in range(8)]
    sizes = [1, 1, 1, 2, 5, 5, 16, 17, 60]
    for sequence, logits in zip(
        sequences, paged.run(sequences, lambda: paged.random.choice(sizes)), strict=True
    ):
        paged.assert_matches(sequence, logits)


def test_many_decodes_of_very_different_lengths_run_in_one_step(folder: Path, kernels: str) -> None:
    paged = Paged(folder, kernels)
    sequences = [
        paged.sequence(num_tokens) for num_tokens in (2, 3, 200, 40, 17, 16, 18, 190, 180, 33, 2, 120)
    ]
    for sequence in sequences:
        paged.step([(sequence, sequence.num_tokens - 1)])
    for sequence, logits in zip(sequences, paged.step([(s, 1) for s in sequences]), strict=True):
        paged.assert_matches(sequence, torch.cat([oracle_logits(folder, sequence.token_ids)[:-1], logits]))


def test_nothing_is_written_outside_the_slots_of_the_step(folder: Path, kernels: str) -> None:
    paged = Paged(folder, kernels)
    sequence = paged.sequence(20)
    paged.step([(sequence, 18)])
    before = paged.pool.clone()
    paged.step([(sequence, 2)])
    is_changed = (paged.pool != before) & ~(paged.pool.isnan() & before.isnan())
    block = sequence.block_table[1]
    assert is_changed[:, :, block, :, 2:4].all()
    is_changed[:, :, block, :, 2:4] = False
    assert not is_changed.any()


def test_a_block_holds_keys_then_values_with_heads_apart(folder: Path, kernels: str) -> None:
    config = ModelConfig.from_folder(folder)
    pool = torch.zeros(1, 2, 3, config.num_kv_heads, 4, config.head_dim)
    request = Request(RequestId("r"), (1, 2, 3, 4, 5), SamplingParams(max_tokens=1, seed=0))
    sequence = new_sequence(request, 0, (), 100)
    sequence.block_table = [2, 0]
    backend: AttentionBackend = TorchPagedAttention(pool, config.num_heads)
    if kernels == "native":
        backend = NativePagedAttention(load_ops(), pool, config.num_heads)
    step = backend.plan(build_batch(StepPlan((ScheduledSequence(sequence, 5),)), block_size=4))
    q = torch.randn(5, config.num_heads, config.head_dim)
    k, v = torch.randn(2, 5, config.num_kv_heads, config.head_dim)
    out = step.run(0, q, k, v)
    assert torch.equal(pool[0, 0, 2], k[:4].transpose(0, 1))
    assert torch.equal(pool[0, 1, 2], v[:4].transpose(0, 1))
    assert torch.equal(pool[0, 0, 0, :, 0], k[4])
    assert not pool[0, :, 1].any()
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert (out - expected.transpose(0, 1)).abs().max() < 1e-5


def test_native_logits_are_the_same_bits_however_the_prompt_is_cut_and_batched(
    folder: Path, kernels: str
) -> None:
    if kernels != "native":
        pytest.skip("torch's operators round by the shape of the batch")
    alone = Paged(folder, kernels)
    (expected,) = alone.run([alone.sequence(150)], lambda: 200)
    for seed in range(4):
        paged = Paged(folder, kernels)
        first = paged.sequence(150)  # the same tokens: the same seed
        others = [paged.sequence(paged.random.randint(1, 120)) for _ in range(seed)]
        sizes = random.Random(seed)
        logits = paged.run([*others, first], lambda sizes=sizes: sizes.choice([1, 2, 7, 16, 33, 60]))
        assert torch.equal(logits[-1], expected)
