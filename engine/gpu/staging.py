"""Copies between host and device that the host does not wait for.

Owns pinned memory on the way in and on the way out. On a CPU nothing is copied. Used on the step thread.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`array` on `device`; the copy is queued behind the work that is there."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
