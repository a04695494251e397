"""The runner turns plans into the reference's tokens and log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from core.errors import InvalidConfig
from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.runner import ModelRunner
from engine.sequence import Sequence, new_sequence
from engine.step import SampledToken, ScheduledSequence, StepOutput, StepPlan
from tests.oracle import make_toy_checkpoint, oracle_greedy, oracle_logits

_GREEDY = SamplingParams(max_tokens=100, seed=0, temperature=0.0)
_PROMPT = [(5 * i * i + i + 3) % 512 for i in range(70)]


@pytest.fixture(scope="module")
def config(kernels: Literal["torch", "native"], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=None)
    return EngineConfig(model=str(folder), num_kv_blocks=64, threads=1, cpu_kernels=kernels)


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


@pytest.fixture
def runner(loaded: LoadedModel, config: EngineConfig) -> ModelRunner:
    return ModelRunner(loaded, config)


def start(
    runner: ModelRunner, prompt: list[int], sampling: SamplingParams = _GREEDY, emitted: tuple[int, ...] = ()
) -> Sequence:
    request = Request(RequestId("r"), tuple(prompt), sampling)
    sequence = new_sequence(request, 0, emitted, runner.max_context)
    assert runner.cache.try_start(sequence)
    return sequence


def step(runner: ModelRunner, *items: ScheduledSequence) -> StepOutput:
    """Run and apply, as a worker does."""
    output = runner.run(StepPlan(items))
    for index, (item, sampled) in enumerate(zip(items, output.sampled, strict=True)):
        item.sequence.num_computed_tokens += item.num_scheduled_tokens
        item.sequence.prompt_logprobs += output.prompt_logprobs.get(index, ())
        if len(sampled) == 1:
            item.sequence.append(sampled[0].token_id)
            assert runner.cache.try_grow(item.sequence, item.sequence.num_tokens)
    return output


def chunk(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(sequence, min(num_tokens, sequence.num_uncomputed_tokens))


@pytest.mark.parametrize("num_chunk_tokens", [16, 30, 512])
def test_greedy_tokens_are_those_of_the_reference(
    runner: ModelRunner, config: EngineConfig, num_chunk_tokens: int
) -> None:
    prompts = [_PROMPT, _PROMPT[:1], _PROMPT[:16], _PROMPT[10:43]]
    sequences = [start(runner, prompt) for prompt in prompts]
    while any(sequence.num_output_tokens < 20 for sequence in sequences):
        step(runner, *(chunk(sequence, num_chunk_tokens) for sequence in sequences))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = oracle_greedy(Path(config.model), prompt, 20)
        assert sequence.output_token_ids[:20] == expected


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(runner: ModelRunner) -> None:
    sequence, other = start(runner, _PROMPT), start(runner, _PROMPT[:5])
    output = step(runner, chunk(sequence, 69), chunk(other, 5))
    assert [len(sampled) for sampled in output.sampled] == [0, 1]
    assert len(step(runner, chunk(sequence, 1)).sampled[0]) == 1


def test_a_prompt_that_is_only_read_samples_nothing(runner: ModelRunner) -> None:
    sequence = start(runner, _PROMPT)
    output = step(runner, ScheduledSequence(sequence, 70, is_sampled=False))
    assert output.sampled == ((),)


def test_samples_from_one_prompt_are_those_of_separate_runs(runner: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=4, seed=7, temperature=1.0, top_p=0.9)
    sequence = start(runner, _PROMPT, sampling)
    output = step(runner, ScheduledSequence(sequence, 70, sample_indices=(0, 1, 2, 3)))
    together = [sampled.token_id for sampled in output.sampled[0]]
    assert [sampled.sample_index for sampled in output.sampled[0]] == [0, 1, 2, 3]
    assert len(set(together)) > 1
    apart: list[SampledToken] = []
    for sample_index in range(4):
        alone = start(runner, _PROMPT, sampling)
        alone.sample_index = sample_index
        apart += step(runner, chunk(alone, 512)).sampled[0]
    assert [sampled.token_id for sampled in apart] == together


@pytest.mark.parametrize("num_chunk_tokens", [1, 16, 512])
def test_prompt_logprobs_are_the_references_in_any_chunks(
    runner: ModelRunner, config: EngineConfig, num_chunk_tokens: int
) -> None:
    sampling = replace(_GREEDY, prompt_logprobs=3)
    sequence, plain = start(runner, _PROMPT, sampling), start(runner, _PROMPT[:3])
    while sequence.num_output_tokens < 3:
        output = step(runner, chunk(plain, 512), chunk(sequence, num_chunk_tokens))
        assert 0 not in output.prompt_logprobs
    expected = torch.log_softmax(oracle_logits(Path(config.model), _PROMPT), dim=-1)
    assert [entry.token_id for entry in sequence.prompt_logprobs] == _PROMPT[1:]
    for row, entry in zip(expected, sequence.prompt_logprobs, strict=False):
        assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-3)
        values, ids = row.topk(3)
        assert [token_id for token_id, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_a_preempted_prompt_records_its_logprobs_once(runner: ModelRunner) -> None:
    sequence = start(runner, _PROMPT, replace(_GREEDY, prompt_logprobs=0))
    step(runner, chunk(sequence, 40))
    runner.cache.release(sequence)
    assert runner.cache.try_start(sequence)
    while sequence.num_uncomputed_tokens > 1:
        step(runner, chunk(sequence, 30))
    assert [entry.token_id for entry in sequence.prompt_logprobs] == _PROMPT[1:]


def test_emitted_tokens_are_facts_and_are_read_like_the_prompt(
    runner: ModelRunner, config: EngineConfig
) -> None:
    expected = oracle_greedy(Path(config.model), _PROMPT, 12)
    sequence = start(runner, _PROMPT, emitted=tuple(expected[:5]))
    while sequence.num_output_tokens < 12:
        step(runner, chunk(sequence, 32))
    assert sequence.output_token_ids == expected


def test_a_cached_prefix_gives_the_same_tokens(runner: ModelRunner, config: EngineConfig) -> None:
    first = start(runner, _PROMPT)
    step(runner, chunk(first, 512))
    runner.cache.publish_full(first)
    second = start(runner, [*_PROMPT[:50], 9, 8, 7])
    assert second.num_computed_tokens == 48
    while second.num_output_tokens < 8:
        step(runner, chunk(first, 512), chunk(second, 512))
    assert second.output_token_ids == oracle_greedy(Path(config.model), [*_PROMPT[:50], 9, 8, 7], 8)


def test_block_copies_are_made_before_the_step(runner: ModelRunner, config: EngineConfig) -> None:
    sequence = start(runner, _PROMPT)
    step(runner, chunk(sequence, 512))
    old = sequence.block_table[-1]
    spare = runner.cache.allocator.try_allocate(1)
    assert spare is not None
    sequence.block_table[-1] = spare[0]
    output = runner.run(StepPlan((chunk(sequence, 1),), copies=((old, spare[0]),)))
    assert output.sampled[0][0].token_id == oracle_greedy(Path(config.model), _PROMPT, 2)[1]


def test_warming_up_leaves_no_trace(runner: ModelRunner) -> None:
    runner.warm_up()
    runner.cache.allocator.check([])
    assert runner.cache.allocator.num_free == 64
    assert runner.cache.num_query_tokens == 0


def test_the_layout_is_what_config_and_model_say(runner: ModelRunner) -> None:
    assert runner.layout.block_shape == (2, 2, 2, 16, 16)
    assert runner.layout.model == runner.model_config.digest
    assert runner.cache.pool.tensor.shape == (2, 2, 64, 2, 16, 16)


def test_the_pool_is_sized_in_bytes_or_in_blocks(loaded: LoadedModel, config: EngineConfig) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    by_bytes = replace(config, num_kv_blocks=0, kv_cache_bytes=10 * block_bytes + 5)
    assert ModelRunner(loaded, by_bytes).cache.allocator.num_blocks == 10
    with pytest.raises(InvalidConfig, match="less than one block"):
        ModelRunner(loaded, replace(by_bytes, kv_cache_bytes=block_bytes - 1))


def test_a_context_beyond_the_models_is_refused_and_a_cap_is_kept(config: EngineConfig) -> None:
    assert load_model(replace(config, max_context=100)).max_context == 100
    with pytest.raises(InvalidConfig, match="256"):
        load_model(replace(config, max_context=257))


def test_a_name_that_is_neither_folder_nor_repository_is_refused(config: EngineConfig) -> None:
    with pytest.raises(InvalidConfig, match="no_such_folder"):
        load_model(replace(config, model="no_such_folder"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no such device")
def test_an_absent_device_is_refused(config: EngineConfig) -> None:
    with pytest.raises(InvalidConfig, match="cuda"):
        load_model(replace(config, device="cuda"))
