"""Sampling with kernels: tokens stay on the device, their copy to the host is under way when `draw` returns.

Owns the way from the kernels' results to columns and log-probabilities. The gap of a token is that of its
score only: how near filter decisions were is not part of it. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.errors import StepFailed
from core.request import TokenLogprob
from engine.gpu.staging import HostCopy, to_device
from engine.kernels.sampling import sample
from engine.kernels.sampling_logprobs import Logprobs, token_logprobs
from engine.kernels.sampling_pack import pack
from engine.sampling import SampledColumns, SamplingColumns
from engine.sampling.sampled import no_tokens
from engine.sampling.settings import Ints


class DeviceSampler:
    """A `StepSampler`; see `engine.executor`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, columns: SamplingColumns) -> DrawnOnDevice:
        """One token for each row of float32 logits `[num_rows, vocab]`, which are left as they are."""
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(columns)
        vocab_size = logits.shape[1]
        found = sample(logits.contiguous(), pack(columns, vocab_size, self._device))
        draws = found.draws
        token_ids = draws.token_ids
        tokens = torch.stack([token_ids, draws.gaps.view(torch.int32), draws.is_finite])
        wanted = np.minimum(columns.settings["num_logprobs"], vocab_size)
        return DrawnOnDevice(token_ids, HostCopy([tokens]), PendingLogprobs.of(found.logprobs, wanted))


class DrawnOnDevice:
    """`token_ids` int32 `[num_rows]` on the device, and the rest of the answer on its way."""

    def __init__(self, token_ids: torch.Tensor, copy: HostCopy, logprobs: PendingLogprobs | None) -> None:
        self.token_ids = token_ids
        self._copy = copy
        self._logprobs = logprobs

    def settled(self) -> SampledColumns:
        """Wait for the copy. Raises StepFailed if a row's logits had a NaN or no finite maximum."""
        (tokens,) = self._copy.wait()
        token_ids, gaps, is_finite = tokens.numpy()
        if not is_finite.all():
            raise StepFailed("logits are not finite", row=int(is_finite.argmin()))
        found = {} if self._logprobs is None else self._logprobs.by_row(token_ids.tolist())
        return SampledColumns(token_ids.astype(np.int64), gaps.view(np.float32).astype(np.float64), found)


class DrawnNothing:
    """No rows; settled when `computed` has been."""

    def __init__(self, computed: torch.Tensor) -> None:
        self._copy = HostCopy([computed.view(-1)[:1]])

    def settled(self) -> SampledColumns:
        self._copy.wait()
        return no_tokens()


class PendingLogprobs:
    """Log-probabilities on their way; row i has its token's and those of `wanted[i]` best ones (-1: none)."""

    def __init__(self, copy: HostCopy, wanted: Ints) -> None:
        self._copy = copy
        self._wanted = wanted

    @classmethod
    def of(cls, logprobs: Logprobs | None, wanted: Ints) -> PendingLogprobs | None:
        if logprobs is None:
            return None
        return cls(HostCopy([logprobs.chosen, logprobs.top_ids, logprobs.top]), wanted)

    def by_row(self, token_ids: Sequence[int]) -> dict[int, TokenLogprob]:
        """Wait; those of the rows that want any."""
        chosen, top_ids, top = (part.tolist() for part in self._copy.wait())
        return {
            row: TokenLogprob(
                token_ids[row], chosen[row], tuple(zip(top_ids[row][:num], top[row][:num], strict=True))
            )
            for row, num in enumerate(self._wanted.tolist())
            if num >= 0
        }


class PromptLogprobs:
    """Log-probabilities of given tokens, `num_top` best ones with each; see `engine.executor.Pending`."""

    def __init__(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> None:
        """`logits` float32 `[num_tokens, vocab]`."""
        self._token_ids = list(token_ids)
        num_top = min(num_top, logits.shape[1])
        wanted = np.full(len(self._token_ids), num_top, dtype=np.int32)
        self._pending: PendingLogprobs | None = None
        if self._token_ids:
            ids = to_device(np.array(self._token_ids, dtype=np.int32), logits.device)
            found = token_logprobs(logits, ids, to_device(wanted, logits.device), num_top)
            self._pending = PendingLogprobs.of(found, wanted.astype(np.int64))

    def settled(self) -> Sequence[TokenLogprob]:
        if self._pending is None:
            return []
        return list(self._pending.by_row(self._token_ids).values())
