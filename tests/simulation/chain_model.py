"""ChainModel: a device whose answers depend on every KV slot that a step attends to.

A slot holds its token and position. The logits of a row are a hash of all slots from the first one to the
row's own, read back from the pool as attention would; so a wrong, stale or unwritten slot changes the answer,
and is noted as a fault by itself. The rest of the engine, its sampler included, is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from core.ids import RequestId
from core.request import Request, TokenLogprob
from engine.batch import Batch, Ints
from engine.config import EngineConfig
from engine.executor import Pending
from engine.kv.pool import KVPool
from engine.loaded_model import LoadedModel
from engine.model.config import ModelConfig
from engine.model.rope_config import RopeConfig
from engine.model.transformer import Transformer
from engine.runner import ModelRunner
from engine.sampling import SampledColumns, token_logprobs
from engine.sampling.sampled import no_tokens
from engine.sequence import finish_reason_after, new_sequence
from engine.step import ScheduledSequence, StepPlan
from engine.stream_step import StreamStep

VOCAB_SIZE = 32
EOS = 2
BLOCK_SIZE = 4
MAX_CONTEXT = 96

_Hashes = NDArray[np.uint64]
_WEIGHTS: _Hashes = np.random.default_rng(7).integers(
    1, 1 << 63, MAX_CONTEXT + 1, dtype=np.uint64
) | np.uint64(1)
_TOKENS: _Hashes = np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class ChainExecutor:
    """An `engine.executor.Executor` on a pool `[1, 2, num_blocks, 1, BLOCK_SIZE, 2]`."""

    def __init__(self, pool: KVPool, faults: list[str]) -> None:
        """`faults` gets a line for each row that attends to something that is not its sequence's."""
        self._slots = pool.tensor[0, 0, :, 0].numpy()  # [num_blocks, BLOCK_SIZE, token and position]
        self._faults = faults
        self._hashes: _Hashes = np.empty(0, dtype=np.uint64)

    @property
    def warm_up_sampling(self) -> Sequence[object]:
        return ()

    def record_steps(self) -> None:
        """There is nothing to record."""

    def forward(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        tokens, positions = batch.token_ids.numpy(), batch.positions.numpy()
        self._slots[batch.token_blocks, batch.token_offsets, 0] = tokens + 1
        self._slots[batch.token_blocks, batch.token_offsets, 1] = positions + 1
        sequences = [item.sequence.token_ids for item in plan.scheduled]
        rows = [self._row(batch, row, sequences[index]) for row, index in enumerate(batch.order.tolist())]
        self._hashes = np.concatenate(rows)
        return torch.arange(len(tokens), dtype=torch.float32)[:, None]

    def _row(self, batch: Batch, row: int, token_ids: list[int]) -> _Hashes:
        num_context = int(batch.num_context[row])
        num_tokens = num_context + int(batch.num_new[row])
        table = batch.block_tables[row, : -(-num_tokens // BLOCK_SIZE)]
        slots = self._slots[table].reshape(-1, 2)[:num_tokens]
        right = np.stack((np.array(token_ids[:num_tokens]) + 1, np.arange(1, num_tokens + 1)), axis=1)
        if not np.array_equal(slots, right):
            self._faults.append(f"attended to {slots.tolist()} in the place of {right.tolist()}")
        with np.errstate(over="ignore"):
            sums = np.cumsum(slots[:, 0].astype(np.uint64) * _WEIGHTS[:num_tokens])
        return sums[num_context:]

    def logits(self, hidden: torch.Tensor, rows: Ints, samples: Ints | None = None) -> torch.Tensor:
        hashes = self._hashes[rows]
        with np.errstate(over="ignore"):
            mixed = hashes[:, None] ^ _TOKENS
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        logits = torch.from_numpy((mixed >> np.uint64(44)).astype(np.float32) / (1 << 18))
        return logits if samples is None else logits[torch.from_numpy(samples)]

    def drawn_nothing(self, hidden: torch.Tensor) -> Pending[SampledColumns]:
        return no_tokens()

    def remember(self, streams: StreamStep, drawn: Pending[SampledColumns]) -> None:
        """They are known already."""

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> Pending[Sequence[TokenLogprob]]:
        return _Known(token_logprobs(logits, token_ids, num_top))


class _Known:
    def __init__(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._logprobs = logprobs

    def settled(self) -> Sequence[TokenLogprob]:
        return self._logprobs


def chain_runner(num_blocks: int, faults: list[str]) -> ModelRunner:
    """A real runner with `num_blocks` KV blocks on the chain model."""
    model = ModelConfig(
        *("chain", "ChainForCausalLM", VOCAB_SIZE, 2, 2, 1, 1, 1, 2, 1e-5, RopeConfig(), MAX_CONTEXT, True),
        eos_token_ids=frozenset({EOS}),
        weights="chain",
    )
    loaded = LoadedModel(Path("chain"), model, cast(Transformer, None), MAX_CONTEXT, torch.device("cpu"))
    config = EngineConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, threads=1, cpu_kernels="torch")
    runner = ModelRunner(loaded, config)
    runner._executor = ChainExecutor(runner.cache.pool, faults)  # type: ignore[assignment]
    return runner


class Oracle:
    """The undisturbed answers: one sequence at a time, on a runner of its own."""

    def __init__(self) -> None:
        self._faults: list[str] = []
        self._runner = chain_runner(MAX_CONTEXT // BLOCK_SIZE + 1, self._faults)

    def answer(self, request: Request, sample_index: int) -> tuple[int, ...]:
        """The output tokens of one sample, a final end-of-sequence included."""
        sequence = new_sequence(request, sample_index, (), MAX_CONTEXT)
        assert self._runner.cache.try_start(sequence)
        ends = frozenset({EOS})
        while finish_reason_after(sequence, ends) is None or sequence.num_output_tokens == 0:
            assert self._runner.cache.try_grow(sequence, sequence.num_tokens)
            num_new = sequence.num_tokens - sequence.num_computed_tokens
            output = self._runner.run(StepPlan((ScheduledSequence(sequence, num_new),)))
            sequence.num_computed_tokens += num_new
            sequence.append(output.sampled[0][0].token_id)
        self._runner.cache.release(sequence)
        assert not self._faults
        return tuple(sequence.token_ids[request.num_prompt_tokens :])


def named(number: int) -> RequestId:
    return RequestId(f"request-{number}")
