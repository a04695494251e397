"""ModelRunner: one loaded model and one KV pool; runs a StepPlan.

Owns the sequence of a step: copies, batch, forward, head for the rows that are wanted, sampling. Does not
decide what to run and does not change sequences. One runner per worker, used on its step thread; several may
share one LoadedModel.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from core.errors import InvalidConfig
from core.ids import RequestId
from core.kv_layout import KVLayout
from core.request import Request
from engine.attention import AttentionBackend, TorchPagedAttention
from engine.batch import Batch, Ints, build_batch
from engine.config import EngineConfig
from engine.cores import CoreShare, usable_cores
from engine.executor import Executor, HostExecutor, Pending, StepSampler
from engine.gpu.ipc_cuda import share_pool
from engine.gpu.ipc_memory import PoolIpcMemory
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from engine.loaded_model import LoadedModel, load_model
from engine.memory import num_fitting_blocks
from engine.model.progress import Progress
from engine.native.attention import NativePagedAttention
from engine.pair_group import TorchGroups, groups_of
from engine.running_step import PendingLogprobs, RunningStep
from engine.sampling import (
    SampledColumns,
    Sampler,
    SamplingRow,
    columns_of,
    join_columns,
    row_of,
)
from engine.sampling.sampled import no_tokens
from engine.sequence import new_sequence
from engine.step import ScheduledSequence, StepLimits, StepOutput, StepPlan
from engine.step_costs import StepWork
from engine.token_feed import TokenFeed

# The head is applied to at most this many rows of prompt log-probabilities at a time: with a vocabulary of
# 150,000, 64 rows are 40 MB of logits.
_MAX_PROMPT_ROWS = 64

_log = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps of `loaded` over a pool of its own.

    `cache` holds pool and allocator; `max_context` bounds prompt and output of a sequence; `weight_bytes` is
    the memory that its weights take.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, limits: StepLimits | None = None) -> None:
        """`limits` bounds the steps that will be asked for. Raises InvalidConfig when the KV pool would not
        hold a single block.
        """
        limits = limits or StepLimits()
        self.model_config = loaded.config
        self.max_context = loaded.max_context
        self.weight_bytes = loaded.weight_bytes
        self.layout = KVLayout(
            model=loaded.config.digest,
            num_layers=loaded.config.num_layers,
            num_kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            block_size=config.block_size,
            dtype=loaded.dtype,
        )
        pool = KVPool(self.layout, _num_blocks(loaded, config, self.layout, limits), loaded.device)
        self.cache = KVCache(pool, BlockAllocator(pool.num_blocks), config.enable_prefix_cache)
        self._executor, self._sampler = _engine_parts(loaded, config, pool, limits)
        self._cores = _core_share(config, loaded)
        self._ops = loaded.ops
        self.is_overlapped = config.is_overlapped
        """Whether a worker that decodes starts a step before it has read the one before."""
        self.num_shared_cores = usable_cores() if loaded.device.type == "cpu" and not config.threads else 0
        """Cores that other workers of the host may take from a step; 0: its speed does not depend on them."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        limits: StepLimits | None = None,
    ) -> ModelRunner:
        """Load the model that `config` names and make a pool for it. Raises InvalidConfig."""
        use_threads(config.threads)
        return cls(load_model(config, progress), config, limits)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute a step. Raises StepFailed when logits are not finite; then nothing of the step counts."""
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> RunningStep:
        """Begin a step: on a GPU it is queued, and the host does not wait; on a CPU it is computed here.

        Steps run in the order of their starts. On a GPU, and where `overlap` is on, a plan may hold streams
        whose last token is UNKNOWN_TOKEN: the one that the last started step samples for them. Their logits
        must not be penalized, since penalties are computed from the tokens that the host knows.
        """
        if self._cores is None or self._ops is None:
            return self._start(plan)
        with self._cores.step(_work(plan)) as num_threads:
            if num_threads != torch.get_num_threads():
                torch.set_num_threads(num_threads)
            with self._ops.divided(self._cores.division):
                return self._start(plan)

    def pause_s(self) -> float:
        """How long the next step should wait for another worker of the host: see `engine.pace`."""
        return 0.0 if self._cores is None else self._cores.pause_s()

    @property
    def was_beside(self) -> bool | None:
        """Whether the last step shared the cores with another worker's; None: for a part of it only."""
        return False if self._cores is None else self._cores.was_beside

    @torch.inference_mode()
    def _start(self, plan: StepPlan) -> RunningStep:
        self.cache.pool.copy_blocks(plan.copies)
        if not len(plan):
            return RunningStep(0, no_tokens(), (), {})
        batch = build_batch(plan, self.layout.block_size)
        hidden = self._executor.forward(plan, batch)
        drawn, samples = self._sample(plan, batch, hidden)
        return RunningStep(len(plan.streams), drawn, samples, self._prompt_logprobs(plan, batch, hidden))

    def shared_pool(self) -> PoolIpcMemory | None:
        """What the bridge needs to reach the pool from another process of the host without the host's memory;
        None for a pool on a CPU. Raises OSError when the driver cannot.
        """
        return share_pool(self.cache.pool)

    def pair_groups(self, host: str) -> TorchGroups | None:
        """What the bridge needs to reach workers anywhere: process groups for blocks of the pool,
        whose sockets listen at `host`. None where torch has none.
        """
        return groups_of(self.cache.pool, host)

    def warm_up(self) -> None:
        """Run a small prefill and a decode, so that the first request does not pay for first uses.

        Before the worker serves; borrows blocks from the allocator and leaves no trace in the cache. On a GPU
        each kernel of the sampler is compiled and decode steps are recorded, which takes longer.
        """
        num_tokens = min(2 * self.layout.block_size, self.max_context - 1)
        table = self.cache.allocator.try_allocate(self.layout.num_blocks(num_tokens + 1))
        if table is None:  # a pool of one or two blocks, as tests have
            return
        for sampling in self._executor.warm_up_sampling:
            request = Request(RequestId("warm-up"), (0,) * num_tokens, sampling)
            sequence = new_sequence(request, 0, (), self.max_context)
            sequence.block_table = table
            # a GPU has kernels of their own for one, for a few and for many tokens
            for num_new in (2, num_tokens - 2, 1) if num_tokens > 2 else (num_tokens, 1):
                item = ScheduledSequence(sequence, num_new)
                output = self.run(StepPlan((item,)))
                sequence.num_computed_tokens += item.num_scheduled_tokens
                for token in output.sampled[0]:
                    sequence.append(token.token_id)
        self.cache.allocator.release(table)
        self._executor.record_steps()

    def _sample(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor
    ) -> tuple[Pending[SampledColumns], tuple[tuple[int, ...], ...]]:
        """The next token of each stream, then those of each chunk; and which samples these are of."""
        num_streams = len(plan.streams)
        lasts = (batch.starts + batch.num_new - 1)[batch.rows_by_plan()]
        rows: list[SamplingRow] = []
        tokens: list[int] = []  # of `hidden`, one for each row
        samples: list[tuple[int, ...]] = []
        for item, last in zip(plan.chunks, lasts[num_streams:].tolist(), strict=True):
            wanted: tuple[int, ...] = ()
            if item.is_sampled and item.reaches_end:
                wanted = item.sample_indices or (item.sequence.sample_index,)
            rows += [row_of(item.sequence, self.model_config.eos_token_ids, sample) for sample in wanted]
            tokens += [last] * len(wanted)
            samples.append(wanted)
        columns = plan.streams.sampling(self.model_config.eos_token_ids)
        if rows:
            columns = join_columns(columns, columns_of(rows))
        if not len(columns):
            return self._executor.drawn_nothing(hidden), tuple(samples)
        drawn = self._sampler.draw(self._logits(hidden, lasts[:num_streams], tokens), columns)
        self._executor.remember(plan.streams, drawn)
        return drawn, tuple(samples)

    def _logits(self, hidden: torch.Tensor, stream_tokens: Ints, chunk_tokens: list[int]) -> torch.Tensor:
        """One row for each token; samples of one chunk share the work of the head."""
        distinct = list(dict.fromkeys(chunk_tokens))
        wanted = np.concatenate([stream_tokens, np.array(distinct, dtype=np.int64)])
        if len(distinct) == len(chunk_tokens):
            return self._executor.logits(hidden, wanted)
        place = {token: row for row, token in enumerate(distinct, len(stream_tokens))}
        rows = [*range(len(stream_tokens)), *(place[token] for token in chunk_tokens)]
        return self._executor.logits(hidden, wanted, np.array(rows, dtype=np.int64))

    def _prompt_logprobs(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor
    ) -> dict[int, list[PendingLogprobs]]:
        found: dict[int, list[PendingLogprobs]] = {}
        if not plan.chunks:  # streams have read their prompts
            return found
        starts = batch.starts[batch.rows_by_plan()][len(plan.streams) :].tolist()
        for index, (item, start) in enumerate(zip(plan.chunks, starts, strict=True)):
            sequence, num_top = item.sequence, item.sequence.request.sampling.prompt_logprobs
            if num_top is None:
                continue
            # Position p predicts the prompt's token p + 1. What an earlier run of this sequence has recorded
            # before it was preempted is not recorded twice.
            context = item.num_context_tokens
            first = max(context, len(sequence.prompt_logprobs))
            last = min(context + item.num_scheduled_tokens, sequence.num_prompt_tokens - 1)
            found[index] = []
            for begin in range(first, last, _MAX_PROMPT_ROWS):
                end = min(begin + _MAX_PROMPT_ROWS, last)
                rows = np.arange(start + begin - context, start + end - context)
                logits = self._executor.logits(hidden, rows)
                targets = sequence.token_ids[begin + 1 : end + 1]
                found[index].append(self._executor.token_logprobs(logits, targets, num_top))
        return found


def _work(plan: StepPlan) -> StepWork:
    chunks = [item.num_scheduled_tokens for item in plan.chunks if item.num_scheduled_tokens > 1]
    return StepWork(sum(chunks), len(plan) - len(chunks))


def use_threads(num_threads: int) -> None:
    """Set torch's threads for the whole process; 0 means the cores this process may use.

    Said explicitly, because Ray's processes start with OMP_NUM_THREADS=1.
    """
    torch.set_num_threads(num_threads or usable_cores())


def _core_share(config: EngineConfig, loaded: LoadedModel) -> CoreShare | None:
    """None where the number of threads is given, or could change a result: only the native operators give
    the same bits with any number.
    """
    if config.threads or loaded.ops is None:
        return None
    try:
        return CoreShare(usable_cores(), stretch=config.decode_stretch)
    except OSError as error:
        _log.warning("the workers of this host do not share their cores: %s", error)
        return None


def _engine_parts(
    loaded: LoadedModel, config: EngineConfig, pool: KVPool, limits: StepLimits
) -> tuple[Executor, StepSampler]:
    if loaded.is_triton:
        from engine.gpu.parts import triton_parts  # loads triton, which a CPU need not have

        return triton_parts(loaded, config, pool, limits)
    num_heads = loaded.config.num_heads
    if loaded.ops is not None:
        backend: AttentionBackend = NativePagedAttention(loaded.ops, pool.tensor, num_heads)
    else:
        backend = TorchPagedAttention(pool.tensor, num_heads)
    feed = TokenFeed(limits.num_slots, loaded.device) if config.is_overlapped else None
    return HostExecutor(loaded.transformer, backend, feed), Sampler()


def _num_blocks(loaded: LoadedModel, config: EngineConfig, layout: KVLayout, limits: StepLimits) -> int:
    if config.num_kv_blocks:
        return config.num_kv_blocks
    if loaded.device.type == "cuda":
        from engine.gpu.profile import measured_memory

        probe = ModelRunner(loaded, replace(config, num_kv_blocks=1), limits)
        memory = measured_memory(
            loaded.device, loaded.weight_bytes.device, layout, limits, loaded.max_context, probe.run
        )
        return num_fitting_blocks(memory, config.gpu_memory_utilization, layout.block_bytes)
    num_blocks = config.kv_cache_bytes // layout.block_bytes
    if num_blocks < 1:
        raise InvalidConfig(
            f"kv_cache_bytes {config.kv_cache_bytes} is less than one block of {layout.block_bytes} bytes",
            key="engine.kv_cache_bytes",
        )
    return num_blocks
