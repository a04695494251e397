"""TritonExecutor: a step on a device, queued and not waited for.

Owns the copies to the device, the choice between a recorded step and plain launches, and the tokens that are
known only there. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from core.request import SamplingParams, TokenLogprob
from engine.batch import Batch, Ints
from engine.cuda_graphs import DecodeGraphs
from engine.executor import Pending
from engine.gpu.sampler import DrawnNothing, DrawnOnDevice, PromptLogprobs
from engine.gpu.staging import to_device
from engine.kernels.attention import TritonPagedAttention
from engine.model.transformer import Transformer
from engine.sampling import SampledColumns
from engine.step import StepLimits, StepPlan
from engine.stream_step import StreamStep
from engine.token_feed import TokenFeed, feed_slots


class TritonExecutor:
    """See `engine.executor.Executor`."""

    def __init__(
        self,
        model: Transformer,
        attention: TritonPagedAttention,
        limits: StepLimits,
        device: torch.device,
        graphs: Callable[[TokenFeed], DecodeGraphs] | None = None,
    ) -> None:
        """`graphs` makes the recordings of decode steps; without, all steps are launched plainly."""
        self._model = model
        self._attention = attention
        self._device = device
        self._feed = TokenFeed(limits.num_slots, device)
        self._graphs = None if graphs is None else graphs(self._feed)

    @property
    def warm_up_sampling(self) -> Sequence[SamplingParams]:
        """Each kernel that is compiled for how a row is sampled; for logprobs there is one per power of 2."""
        plain = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        if self._device.type == "cpu":  # nothing is compiled
            return [plain]
        penalized = replace(plain, temperature=1.0, top_p=0.9, frequency_penalty=0.1)
        return [
            plain,
            replace(plain, temperature=1.0),
            penalized,
            *(replace(plain, logprobs=num, prompt_logprobs=num) for num in (0, 1, 2, 4, 8, 16, 20)),
        ]

    def record_steps(self) -> None:
        if self._graphs is not None:
            self._graphs.record_all()

    def forward(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        slots = feed_slots(plan.streams, batch)
        if self._graphs is not None:
            hidden = self._graphs.forward(batch, slots)
            if hidden is not None:
                return hidden
        token_ids = to_device(batch.token_ids.numpy(), self._device)
        if slots is not None:
            token_ids = self._feed.resolve(token_ids, to_device(slots, self._device))
        positions = to_device(batch.positions.numpy(), self._device)
        return self._model.forward(token_ids, positions, self._attention.plan(batch))

    def logits(self, hidden: torch.Tensor, rows: Ints, samples: Ints | None = None) -> torch.Tensor:
        logits = self._model.logits(hidden.index_select(0, to_device(rows, self._device)))
        return logits if samples is None else logits.index_select(0, to_device(samples, self._device))

    def drawn_nothing(self, hidden: torch.Tensor) -> Pending[SampledColumns]:
        return DrawnNothing(hidden)

    def remember(self, streams: StreamStep, drawn: Pending[SampledColumns]) -> None:
        assert isinstance(drawn, DrawnOnDevice)
        self._feed.keep(streams, drawn.token_ids[: len(streams)])

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> Pending[Sequence[TokenLogprob]]:
        return PromptLogprobs(logits, token_ids, num_top)
