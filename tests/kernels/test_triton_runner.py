"""The runner on Triton kernels: the reference's tokens for each family, the sampler's for each parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import InvalidConfig, StepFailed
from core.request import SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.step import ScheduledSequence, StepPlan
from engine.stream_rows import StreamRows
from engine.stream_step import UNKNOWN_TOKEN
from tests.kernels.toy_runner import GREEDY, PROMPT, chunk, make_runner, start, step, triton_config
from tests.oracle import ARCHITECTURES, make_toy_checkpoint, oracle_greedy, oracle_logits


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return triton_config(make_toy_checkpoint(tmp_path_factory.mktemp("toy"), "qwen3", eos_token_id=None))


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> ModelRunner:
    return make_runner(config)


@pytest.mark.parametrize(
    ("arch", "is_tied"), list(zip(ARCHITECTURES, [True, False, False, True], strict=True))
)
def test_tokens_are_the_references_for_each_family(tmp_path: Path, arch: str, is_tied: bool) -> None:
    folder = make_toy_checkpoint(tmp_path, arch, eos_token_id=None, tie_word_embeddings=is_tied)
    runner = make_runner(triton_config(folder))
    prompts = [PROMPT[:33], PROMPT[:1], PROMPT[:16]]
    sequences = [start(runner, prompt) for prompt in prompts]
    while any(sequence.num_output_tokens < 3 for sequence in sequences):
        step(runner, *(chunk(sequence, 20) for sequence in sequences))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output_token_ids[:3] == oracle_greedy(folder, prompt, 3)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.15), ("float16", 0.02)])
def test_sixteen_bits_stay_near_the_reference_and_their_logits_are_fp32(
    config: EngineConfig, dtype: str, bound: float
) -> None:
    runner = make_runner(replace(config, dtype=dtype))
    assert runner.layout.dtype == dtype
    assert str(runner.cache.pool.tensor.dtype) == f"torch.{dtype}"
    sequence = start(runner, PROMPT, replace(GREEDY, prompt_logprobs=0))
    while sequence.num_output_tokens < 2:
        step(runner, chunk(sequence, 20))
    expected = torch.log_softmax(oracle_logits(Path(config.model), PROMPT), dim=-1)
    errors = [
        abs(entry.logprob - float(row[entry.token_id])) / max(1.0, abs(float(row[entry.token_id])))
        for row, entry in zip(expected, sequence.prompt_logprobs, strict=False)
    ]
    assert 0 < sum(errors) / len(errors) < bound


def test_the_layouts_of_two_precisions_differ_by_name(runner: ModelRunner, config: EngineConfig) -> None:
    other = make_runner(replace(config, dtype="bfloat16"))
    assert runner.layout.differences(other.layout) == ["dtype: float32 vs bfloat16"]
    assert runner.layout.fingerprint != other.layout.fingerprint


@pytest.mark.parametrize("kernels", ["auto", "torch", "native"])
def test_the_operators_of_a_cpu_refuse_sixteen_bits_by_name(config: EngineConfig, kernels: str) -> None:
    with pytest.raises(InvalidConfig, match="bfloat16"):
        load_model(replace(config, device="cpu", dtype="bfloat16", cpu_kernels=kernels))


def test_prompt_logprobs_are_the_references(runner: ModelRunner, config: EngineConfig) -> None:
    sequence = start(runner, PROMPT, replace(GREEDY, prompt_logprobs=3))
    while sequence.num_output_tokens < 1:
        step(runner, chunk(sequence, 30))
    expected = torch.log_softmax(oracle_logits(Path(config.model), PROMPT), dim=-1)
    assert [entry.token_id for entry in sequence.prompt_logprobs] == PROMPT[1:]
    for row, entry in zip(expected, sequence.prompt_logprobs, strict=False):
        assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-3)
        assert [token_id for token_id, _ in entry.top] == row.topk(3).indices.tolist()


_SAMPLING = [
    GREEDY,
    SamplingParams(max_tokens=9, seed=5, temperature=1.0, top_p=0.9, logprobs=3),
    SamplingParams(max_tokens=9, seed=6, temperature=0.8, top_k=20, min_p=0.01, logprobs=0),
    SamplingParams(
        max_tokens=9,
        seed=7,
        temperature=1.2,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias=((3, 4.0),),
        min_tokens=2,
    ),
]


def test_samples_logprobs_and_gaps_are_those_of_the_cpus_sampler(
    runner: ModelRunner, config: EngineConfig
) -> None:
    cpu = replace(config, device="cpu", cpu_kernels="torch")
    plain = ModelRunner(load_model(cpu), cpu)

    def run(runner: ModelRunner) -> list[Sequence]:
        sequences = [start(runner, PROMPT[: 9 + i], sampling) for i, sampling in enumerate(_SAMPLING)]
        for _ in range(3):
            drawn = [one for (one,) in step(runner, *map(chunk, sequences)).sampled]
            logprobs.append([one.logprob for one in drawn])
            gaps.append([one.gap for one in drawn])
        for sequence in sequences:
            runner.cache.release(sequence)
        return sequences

    logprobs: list[list[object]] = []
    gaps: list[list[float]] = []
    found, expected = run(runner), run(plain)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    for ours, theirs in zip(logprobs[:3], logprobs[3:], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.token_id == other.token_id  # type: ignore[attr-defined]
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)  # type: ignore[attr-defined]
                assert [i for i, _ in one.top] == [i for i, _ in other.top]  # type: ignore[attr-defined]
    assert gaps[0][0] == pytest.approx(gaps[3][0], abs=1e-3)  # greedy: of logits


def test_samples_from_one_prompt_are_those_of_separate_runs(runner: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=4, seed=7, temperature=1.0, top_p=0.9)
    sequence = start(runner, PROMPT, sampling)
    output = step(runner, ScheduledSequence(sequence, len(PROMPT), sample_indices=(0, 2, 5)))
    together = [(sampled.sample_index, sampled.token_id) for sampled in output.sampled[0]]
    apart = []
    for sample_index in (0, 2, 5):
        (drawn,) = step(runner, chunk(start(runner, PROMPT, sampling, sample_index))).sampled[0]
        apart.append((drawn.sample_index, drawn.token_id))
    assert together == apart


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's arithmetic
def test_logits_that_are_not_finite_fail_the_step(config: EngineConfig) -> None:
    runner = make_runner(config)
    sequence = start(runner, PROMPT)
    step(runner, chunk(sequence))
    runner.cache.pool.tensor[:, :, sequence.block_table[0]] = math.nan
    with pytest.raises(StepFailed, match="finite"):
        step(runner, chunk(sequence))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_may_be_started_before_the_tokens_it_reads_are_known(
    config: EngineConfig, temperature: float
) -> None:
    runner = make_runner(config)
    sampling = SamplingParams(max_tokens=50, seed=3, temperature=temperature)

    def begun() -> list[Sequence]:
        sequences = [start(runner, PROMPT[i : 15 + i], sampling) for i in range(2)]
        step(runner, *map(chunk, sequences))
        for sequence in sequences:
            assert runner.cache.try_grow(sequence, sequence.num_tokens + 5)
        return sequences

    expected = begun()
    for _ in range(3):
        step(runner, *map(chunk, expected))

    rows = StreamRows(runner.layout.block_size, frozenset())
    sequences = begun()
    for index, sequence in enumerate(sequences):
        rows.insert(index, sequence)
    known = rows.step()
    running = runner.start(StepPlan(streams=known))
    for _ in range(2):
        for sequence, num_tokens in rows.at_border(known):
            rows.enter_block(sequence, num_tokens, 0)
        ahead = rows.step(known)
        assert (ahead.token_ids == UNKNOWN_TOKEN).all()
        following = runner.start(StepPlan(streams=ahead))
        rows.advance(known, running.result().streams.token_ids)
        known, running = ahead, following
    rows.advance(known, running.result().streams.token_ids)
    assert [item.token_ids for item in sequences] == [item.token_ids for item in expected]


def test_penalties_are_refused_before_their_history_is_known(config: EngineConfig) -> None:
    runner = make_runner(config)
    sequence = start(runner, PROMPT[:9], replace(GREEDY, frequency_penalty=0.5))
    step(runner, chunk(sequence))
    rows = StreamRows(runner.layout.block_size, frozenset())
    rows.insert(0, sequence)
    ahead = replace(rows.step(), token_ids=np.array([UNKNOWN_TOKEN]))
    with pytest.raises(AssertionError, match="history"):
        runner.start(StepPlan(streams=ahead))


def test_a_step_that_samples_nothing_is_awaited_too(config: EngineConfig) -> None:
    runner = make_runner(config)
    output = runner.start(StepPlan((chunk(start(runner, PROMPT), 20),))).result()
    assert output.sampled == ((),)
    assert len(output.streams) == 0


def test_warming_up_leaves_no_trace(config: EngineConfig) -> None:
    runner = make_runner(config)
    runner.warm_up()
    runner.cache.allocator.check([])
    assert runner.cache.allocator.num_free == 64


def test_without_the_interpreter_a_cpu_is_refused_by_name(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.model.is_interpreted", lambda _: False)
    with pytest.raises(InvalidConfig, match="TRITON_INTERPRET"):
        load_model(replace(config, device="cpu", cpu_kernels="triton"))
