"""Transformers' static and continuous batching on workload B, beside Baton's engine.

The lengths of `bench_static_batching.workload_b`, random prompts, greedy, the end of sequence ignored, the
same fp16 checkpoint; transformers computes in fp32 with SDPA. Static: `generate` on one left-padded batch of
all requests, which runs until the longest is done. Continuous: transformers' own continuous batching (paged
SDPA), whose requests have limits of their own. Only tokens that were asked for count; the modes take turns in
each run. One line each, medians of `--runs`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.bench_static_batching import Bench, Shape, make_requests, workload_b
from engine.config import EngineConfig
from engine.loaded_model import load_model
from engine.runner import ModelRunner, use_threads

_NO_END = -1
_PAGE_SIZE = 64
_TOKENS_PER_STEP = 512
_RESULT_TIMEOUT_S = 600.0

Prompts = Items[tuple[int, ...]]


class Transformers:
    """A loaded model and its two ways to batch."""

    def __init__(self, checkpoint: Path) -> None:
        model: Any = AutoModelForCausalLM  # its methods have no types
        self._model = model.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self._model.eval()

    def static(self, shapes: Items[Shape], prompts: Prompts) -> None:
        """All requests as one padded batch."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        num_steps = max(shape.num_output_tokens for shape in shapes)
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=_greedy(num_steps))
        assert out.shape[1] == longest + num_steps, "a row ended early"

    def continuous(self, shapes: Items[Shape], prompts: Prompts) -> None:
        """Each request with its own length; one that ends makes room for the next."""
        num_tokens = sum(shape.num_prompt_tokens + shape.num_output_tokens for shape in shapes)
        settings = ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=num_tokens // _PAGE_SIZE + 2 * len(shapes),
            max_batch_tokens=_TOKENS_PER_STEP,
            allow_block_sharing=False,
        )
        wanted: dict[str, int] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=_greedy(max(shape.num_output_tokens for shape in shapes)),
            continuous_batching_config=settings,
            block=True,
        ) as manager:
            for index, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True)):
                name = f"request-{index}"
                wanted[name] = shape.num_output_tokens
                manager.add_request(list(prompt), request_id=name, max_new_tokens=shape.num_output_tokens)
            while wanted:
                result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
                assert result is not None, f"no answer for {sorted(wanted)}"
                assert result.error is None, result.error
                assert len(result.generated_tokens) == wanted.pop(result.request_id), "an answer ended early"


def _greedy(max_new_tokens: int) -> Any:
    make: Any = GenerationConfig  # its constructor has no types
    return make(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=_NO_END, pad_token_id=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder in Hugging Face format")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="the first so many of the workload")
    options = parser.parse_args()
    use_threads(0)
    config = EngineConfig(model=str(options.checkpoint), enable_prefix_cache=False)
    runner = ModelRunner(load_model(config), config)
    runner.warm_up()
    shapes = workload_b()[: options.requests]
    baton, other = Bench(runner, len(shapes)), Transformers(options.checkpoint)
    num_tokens = sum(shape.num_output_tokens for shape in shapes)
    rates: dict[str, list[float]] = {}
    for seed in range(options.runs):
        requests = make_requests(shapes, seed, runner.model_config.vocab_size)
        prompts = [request.prompt_token_ids for request in requests]
        modes: dict[str, Callable[[], object]] = {
            "baton, continuous": lambda: baton.run("continuous", requests),  # noqa: B023 - called at once
            "transformers, continuous": lambda: other.continuous(shapes, prompts),  # noqa: B023
            "transformers, static": lambda: other.static(shapes, prompts),  # noqa: B023
        }
        for mode, run in modes.items():
            start = time.perf_counter()
            run()
            rates.setdefault(mode, []).append(num_tokens / (time.perf_counter() - start))
    ours = statistics.median(rates["baton, continuous"])
    for mode, found in rates.items():
        rate = statistics.median(found)
        print(
            f"workload B, {len(shapes)} requests, {mode}: {rate:.1f} tok/s out; "
            f"baton is {ours / rate:.2f} times that"
        )


if __name__ == "__main__":
    main()
