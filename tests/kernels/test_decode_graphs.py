"""Decode steps that are padded and replayed are those that are launched plainly, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from core.ids import RequestId
from core.request import Request
from engine.batch import Batch, build_batch
from engine.cuda_graphs import CallRecorder, DecodeGraphs, GraphRecorder, padded_sizes, split_capacities
from engine.gpu.decode_inputs import DecodeInputs, DecodeShape
from engine.gpu.layers import TritonLayers
from engine.gpu.linear import DeviceLinears
from engine.gpu.profile import largest_decode, largest_step
from engine.gpu.weights import PlacedWeights
from engine.kernels.attention import TritonPagedAttention
from engine.loaded_model import LoadedModel, load_model
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.step import ScheduledSequence, StepLimits, StepPlan
from engine.token_feed import TokenFeed
from tests.kernels.pages import SMALL
from tests.kernels.toy_runner import GREEDY, PROMPT, chunk, start, step, triton_config
from tests.oracle import make_toy_checkpoint, oracle_greedy

_BLOCK_SIZE, _NUM_BLOCKS = 8, 120
REQUEST = Request(RequestId("r"), (1,), GREEDY)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_toy_checkpoint(tmp_path_factory.mktemp("toy"), "qwen3", eos_token_id=None)
    return load_model(triton_config(folder))


class CountingRecorder:
    """Counts the replays of the recordings that another makes."""

    def __init__(self, recorder: CallRecorder | GraphRecorder) -> None:
        self._recorder = recorder
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        replay = self._recorder.record(run)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted


class RowByRow:
    """A `LinearFactory` whose layers multiply each row by itself: torch's products round by their number."""

    def __init__(self, linears: DeviceLinears) -> None:
        self._linears = linears

    def __call__(self, names: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
        linear = self._linears(names)
        return lambda x: torch.cat([linear(row) for row in x.split(1)])


def row_by_row(loaded: LoadedModel) -> Transformer:
    config = loaded.config
    weights = PlacedWeights(load_weights(loaded.folder, config), loaded.device, torch.float32)
    linears = RowByRow(DeviceLinears(weights))
    return Transformer(config, weights, linears, 250, [TritonLayers(config, weights, linears)])


class Site:
    """A pool of random KV, recorded steps over it, and the plain way beside them."""

    def __init__(self, loaded: LoadedModel, max_sequences: int = 8) -> None:
        config, self.device = loaded.config, loaded.device
        self.model = row_by_row(loaded)
        torch.manual_seed(0)
        shape = (config.num_layers, 2, _NUM_BLOCKS, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
        self.pool = torch.randn(shape, device=self.device)
        self.attention = TritonPagedAttention(self.pool, config.num_heads, tiles=SMALL)
        self.feed = TokenFeed(16, self.device)
        recorder = GraphRecorder(self.device) if self.device.type == "cuda" else CallRecorder()
        self.recorder = CountingRecorder(recorder)
        self.graphs = DecodeGraphs(
            self.model, self.attention, self.feed, max_sequences, 250, self.recorder, self.device
        )
        self.graphs.record_all()

    def plain(self, batch: Batch) -> torch.Tensor:
        plan = self.attention.plan(batch)
        return self.model.forward(batch.token_ids.to(self.device), batch.positions.to(self.device), plan)


def random_batch(draw: random.Random, num_sequences: int) -> Batch:
    """One new token each after contexts of any length, in blocks of their own."""
    free = list(range(_NUM_BLOCKS))
    draw.shuffle(free)
    items = []
    for _ in range(num_sequences):
        num_context = draw.choice([0, 1, 7, 8, 31, 32, 33, 63, 64, draw.randrange(100)])
        ids = [draw.randrange(512) for _ in range(num_context + 1)]
        sequence = Sequence(REQUEST, 0, ids, 250, num_context)
        sequence.block_table = [free.pop() for _ in range(num_context // _BLOCK_SIZE + 1)]
        items.append(ScheduledSequence(sequence, 1))
    return build_batch(StepPlan(tuple(items)), _BLOCK_SIZE)


def test_replayed_steps_are_the_plain_ones_bit_for_bit(loaded: LoadedModel) -> None:
    site, draw = Site(loaded), random.Random(4)
    for num_sequences in [1, 3, 8, 5, 6]:
        batch = random_batch(draw, num_sequences)
        before = site.pool.clone()
        expected = site.plain(batch)
        after = site.pool.clone()
        site.pool.copy_(before)
        found = site.graphs.forward(batch, None)
        assert found is not None
        assert torch.equal(found, expected)
        assert torch.equal(site.pool, after), "padding wrote to the pool"
    assert site.recorder.num_replays == 5


def test_padding_is_never_read_nor_written_whatever_lies_in_it(loaded: LoadedModel) -> None:
    """The inputs are those of a full step before; unwritten KV is NaN."""
    site, draw = Site(loaded), random.Random(5)
    assert site.graphs.forward(random_batch(draw, 8), None) is not None
    batch = random_batch(draw, 5)
    site.pool.fill_(torch.nan)
    for table, num_context in zip(batch.block_tables, batch.num_context.tolist(), strict=True):
        for position in range(num_context):
            site.pool[:, :, table[position // _BLOCK_SIZE], :, position % _BLOCK_SIZE] = 0.5
    before = site.pool.clone()
    expected = site.plain(batch)
    after = site.pool.clone()
    site.pool.copy_(before)
    found = site.graphs.forward(batch, None)
    assert found is not None
    assert torch.isfinite(found).all()
    assert torch.equal(found, expected)
    assert torch.equal(site.pool.nan_to_num(7.0), after.nan_to_num(7.0))


def test_steps_that_no_recording_fits_are_left_to_plain_launches(loaded: LoadedModel) -> None:
    site, draw = Site(loaded, max_sequences=4), random.Random(6)
    assert site.graphs.forward(random_batch(draw, 5), None) is None
    sequence = Sequence(REQUEST, 0, [1, 2, 3], 250)
    sequence.block_table = [0]
    two_tokens = build_batch(StepPlan((ScheduledSequence(sequence, 2),)), _BLOCK_SIZE)
    assert site.graphs.forward(two_tokens, None) is None
    assert site.recorder.num_replays == 0


def test_a_token_may_come_from_the_device(loaded: LoadedModel) -> None:
    site, draw = Site(loaded), random.Random(7)
    batch = random_batch(draw, 3)
    expected = site.plain(batch)
    site.feed._tokens[:] = 500
    site.feed._tokens[torch.tensor([9, 2], device=site.device)] = batch.token_ids[[0, 2]].to(site.device)
    hidden_ids = batch.token_ids.clone()
    hidden_ids[[0, 2]] = -1
    found = site.graphs.forward(replace(batch, token_ids=hidden_ids), np.array([9, -1, 2]))
    assert found is not None
    assert torch.equal(found, expected)


def test_a_runner_decodes_by_replay_with_the_references_tokens(loaded: LoadedModel) -> None:
    config = triton_config(loaded.folder)
    runner = ModelRunner(loaded, config, StepLimits(64, 4))
    runner.warm_up()
    prompts = [PROMPT[:9], PROMPT[3:20], PROMPT[7:8]]
    sequences = [start(runner, prompt) for prompt in prompts]
    while any(sequence.num_output_tokens < 4 for sequence in sequences):
        step(runner, *map(chunk, sequences))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output_token_ids[:4] == oracle_greedy(loaded.folder, prompt, 4)


def test_the_largest_step_runs_over_a_pool_of_one_block(loaded: LoadedModel) -> None:
    limits = StepLimits(max_tokens=40, max_sequences=3)
    runner = ModelRunner(loaded, replace(triton_config(loaded.folder), num_kv_blocks=1), limits)
    plan = largest_step(runner.layout, limits, 60)
    assert plan.num_tokens == 40
    output = runner.run(plan)
    assert [len(sampled) for sampled in output.sampled] == [1] * len(plan)
    decode = largest_decode(runner.layout, limits, 60)
    assert decode.num_tokens == len(decode) == 3


def test_sizes_are_few_and_fit_each_number_of_sequences() -> None:
    assert padded_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert padded_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert padded_sizes(1) == [1]
    assert split_capacities(4, 100) == [4, 16, 64, 100]
    assert split_capacities(4, 4) == [4]


def test_a_shapes_inputs_lie_apart_and_aligned() -> None:
    for size in (1, 2, 7, 8):
        shape = DecodeShape(size, 3 * size, 5)
        views = DecodeInputs([shape], torch.device("cpu")).on_device(shape)
        parts = [getattr(views, field.name) for field in fields(views)]
        spans = sorted((part.data_ptr(), part.numel() * part.element_size()) for part in parts)
        assert all(start % 16 == 0 for start, _ in spans)
        assert all(at + length <= after for (at, length), (after, _) in pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= spans[0][0] + 4 * shape.num_words
