"""A runner of the Triton path over a toy checkpoint, and the loop of a worker around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.runner import ModelRunner
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepLimits, StepOutput, StepPlan

GREEDY = SamplingParams(max_tokens=100, seed=0, temperature=0.0)
PROMPT = [(5 * i * i + i + 3) % 512 for i in range(45)]
LIMITS = StepLimits(max_tokens=64, max_sequences=8)


def triton_config(folder: Path, **changes: Any) -> EngineConfig:
    config = EngineConfig(model=str(folder), num_kv_blocks=64, threads=1)
    if torch.cuda.is_available():
        return replace(config, device="cuda", **changes)
    return replace(config, cpu_kernels="triton", **changes)


def make_runner(config: EngineConfig, limits: StepLimits = LIMITS) -> ModelRunner:
    return ModelRunner(load_model(config), config, limits)


def start(
    runner: ModelRunner, prompt: list[int], sampling: SamplingParams = GREEDY, sample_index: int = 0
) -> Sequence:
    request = Request(RequestId("r"), tuple(prompt), sampling)
    sequence = new_sequence(request, sample_index, (), runner.max_context)
    assert runner.cache.try_start(sequence, 1)
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


def chunk(sequence: Sequence, num_tokens: int = 512) -> ScheduledSequence:
    return ScheduledSequence(sequence, min(num_tokens, sequence.num_uncomputed_tokens))
