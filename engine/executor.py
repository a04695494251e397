"""Executor: where a step's arithmetic runs, behind one Protocol; and the one of plain calls, for the host.

Owns the edge between a step's arrays on the host and tensors on a device. Chosen once at start: this one for
CPUs (torch's or native operators), `engine.gpu.executor` for Triton kernels. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from core.request import SamplingParams, TokenLogprob
from engine.attention import AttentionBackend
from engine.batch import Batch, Ints
from engine.model.transformer import Transformer
from engine.sampling import SampledColumns, SamplingColumns, token_logprobs
from engine.sampling.sampled import no_tokens
from engine.step import StepPlan
from engine.stream_step import StreamStep
from engine.token_feed import TokenFeed, feed_slots

_T_co = TypeVar("_T_co", covariant=True)


class Pending(Protocol[_T_co]):
    """A result that may still be on its way to the host."""

    def settled(self) -> _T_co:
        """Wait for it."""
        ...


class StepSampler(Protocol):
    """Logits `[num_rows, vocab]` to one token for each row; see `engine.sampling.Sampler`."""

    def draw(self, logits: torch.Tensor, columns: SamplingColumns) -> Pending[SampledColumns]: ...


class Executor(Protocol):
    """Tensors it returns are on its device; what is done with them is queued there in order."""

    @property
    def warm_up_sampling(self) -> Sequence[SamplingParams]:
        """Parameters with which all of the sampler is used once."""
        ...

    def record_steps(self) -> None:
        """At start, after everything has run once: make ready what is repeated later."""
        ...

    def forward(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """The residual stream of the step, fp32 `[num_tokens, hidden_size]`, in the order of `batch`."""
        ...

    def logits(self, hidden: torch.Tensor, rows: Ints, samples: Ints | None = None) -> torch.Tensor:
        """fp32 logits of some rows of `hidden`; `samples` then repeats and picks among them."""
        ...

    def drawn_nothing(self, hidden: torch.Tensor) -> Pending[SampledColumns]:
        """For a step that samples no row: settled when `hidden` has been computed."""
        ...

    def remember(self, streams: StreamStep, drawn: Pending[SampledColumns]) -> None:
        """The first rows of `drawn` are the next tokens of `streams`: a later plan may ask for them before
        they are known on the host.
        """
        ...

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> Pending[Sequence[TokenLogprob]]: ...


class HostExecutor:
    """Everything is computed when it is asked for."""

    def __init__(
        self, model: Transformer, attention: AttentionBackend, feed: TokenFeed | None = None
    ) -> None:
        """`feed` keeps tokens for plans that do not know them; without, each plan has to know all."""
        self._model = model
        self._attention = attention
        self._feed = feed

    @property
    def warm_up_sampling(self) -> Sequence[SamplingParams]:
        return [SamplingParams(max_tokens=2, seed=0, top_p=0.9)]

    def record_steps(self) -> None:
        """There is nothing to record."""

    def forward(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        token_ids = batch.token_ids
        slots = feed_slots(plan.streams, batch)
        if slots is not None:
            assert self._feed is not None, "this engine was not told to run ahead"
            token_ids = self._feed.resolve(token_ids, torch.from_numpy(slots))
        return self._model.forward(token_ids, batch.positions, self._attention.plan(batch))

    def logits(self, hidden: torch.Tensor, rows: Ints, samples: Ints | None = None) -> torch.Tensor:
        logits = self._model.logits(hidden[torch.from_numpy(rows)])
        return logits if samples is None else logits[torch.from_numpy(samples)]

    def drawn_nothing(self, hidden: torch.Tensor) -> Pending[SampledColumns]:
        return no_tokens()

    def remember(self, streams: StreamStep, drawn: Pending[SampledColumns]) -> None:
        if self._feed is not None:
            self._feed.keep(streams, torch.from_numpy(drawn.settled().token_ids[: len(streams)]))

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> Pending[Sequence[TokenLogprob]]:
        return _Known(token_logprobs(logits, token_ids, num_top))


class _Known:
    def __init__(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._logprobs = logprobs

    def settled(self) -> Sequence[TokenLogprob]:
        return self._logprobs
