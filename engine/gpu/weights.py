"""PlacedWeights: a checkpoint's tensors on a device in one precision, moved when they are asked for.

Owns the conversion. A linear layer that joins several tensors holds its own copy, so nothing else is kept
here but the embedding, which a tied head shares. Used at start, on the loading thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from engine.model.weights import EMBEDDING, FINAL_NORM, Weights


class PlacedWeights(Mapping[str, torch.Tensor]):
    """Canonical name to tensor of `dtype` on `device`; the final norm stays fp32, as what it reads is."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._embedding: torch.Tensor | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != EMBEDDING:
            return self._placed(name)
        if self._embedding is None:
            self._embedding = self._placed(name)
        return self._embedding

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # without moving it

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _placed(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if name == FINAL_NORM else self._dtype
        return self._weights[name].to(self._device, dtype)
