"""Capacity: what one worker (a model on some GPUs) holds and how fast it is, by the roofline.

Owns memory, step time, prefill time and transfer time. A step takes as long as the slower of streaming bytes
(weights once, the KV of each sequence) and of arithmetic. Communication between the GPUs of a worker enters
through the shares only. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planner.hardware import Gpu, Link
from cluster.planner.model_shape import ModelShape

# rates of arithmetic by the width of weights
_WIDTHS = ((4.5, "int4"), (8.0, "fp8"), (64.0, "bf16"))


@dataclass(frozen=True, slots=True)
class Shares:
    """What of the line rates is reached, and what of memory is used; 1.0 is the ceiling of the data sheet.

    `memory` of a GPU may hold weights and KV; `bandwidth` in decode; `flops` in prefill; `link` in a
    transfer; `load` is how busy the pools are planned to be.
    """

    memory: float = 0.9
    bandwidth: float = 0.8
    flops: float = 0.5
    link: float = 0.8
    load: float = 0.8

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops", "link", "load"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"the share of {name} must be above 0 and at most 1")


CEILING = Shares(memory=1.0, bandwidth=1.0, flops=1.0, link=1.0, load=1.0)


@dataclass(frozen=True)
class Capacity:
    """A worker: `shape` cut over `num_gpus` of `gpu` at `shares` of their rates."""

    shape: ModelShape
    gpu: Gpu
    num_gpus: int
    shares: Shares

    @property
    def memory_bytes(self) -> float:
        """What weights and KV may take."""
        return self.num_gpus * self.gpu.memory_bytes * self.shares.memory

    @property
    def kv_budget_bytes(self) -> float:
        """What is left for KV; negative when the weights do not fit."""
        return self.memory_bytes - self.shape.weight_bytes

    @property
    def kv_copies(self) -> float:
        """How many times the GPUs of a worker keep each token's KV between them: once as long as there is a
        head of it for each.
        """
        return max(1.0, self.num_gpus / self.shape.kv_parts)

    def kv_bytes(self, num_tokens: int) -> float:
        """What the KV of a sequence of `num_tokens` takes in the worker."""
        return self.kv_copies * self.shape.kv_bytes(num_tokens)

    def num_sequences(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` whose KV fits at once."""
        return max(0, int(self.kv_budget_bytes // self.kv_bytes(num_tokens)))

    def decode_step_s(self, num_sequences: int, context: int, num_tokens: int = 1) -> float:
        """One step of `num_sequences`, each with `context` tokens of KV and `num_tokens` new ones (a verify
        step of speculation has more than one).
        """
        new_tokens = num_sequences * num_tokens
        read = self.shape.bytes_read(new_tokens) + num_sequences * self.kv_bytes(context)
        return max(read / self.bytes_per_s, self._arithmetic_s(new_tokens))

    def decode_ceiling(self) -> float:
        """Tokens per second of a single sequence without any KV: weights are streamed once per token."""
        return self.bytes_per_s / self.shape.bytes_read(1)

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Reading a prompt of `num_tokens`, `num_cached` of which are cached."""
        uncached = max(1, num_tokens - num_cached)
        streaming = self.shape.bytes_read(uncached) / self.bytes_per_s
        flops = self.shape.flops(uncached, num_tokens - uncached)
        return max(streaming, flops / self._flops_per_s)

    def transfer_s(self, num_tokens: int, link: Link) -> float:
        """The KV of a prompt, once, over `link`, if nothing of it overlaps with prefill."""
        return self.shape.kv_bytes(num_tokens) / (link.bytes_per_s * self.shares.link)

    def max_batch(self, context: int, longest: int, itl_s: float | None) -> int:
        """The most sequences whose KV fits at `longest` tokens and whose step at `context` tokens keeps to
        `itl_s`.
        """
        low, high = 0, self.num_sequences(longest)
        if itl_s is None:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.decode_step_s(middle, context) <= itl_s:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def bytes_per_s(self) -> float:
        """What is read of the memory of all its GPUs."""
        return self.num_gpus * self.gpu.bytes_per_s * self.shares.bandwidth

    @property
    def _flops_per_s(self) -> float:
        width = next(name for bits, name in _WIDTHS if self.shape.weight_bits <= bits)
        # weights of 4 bits are widened before they are multiplied with 16-bit activations
        rate = self.gpu.flops_at("bf16" if width == "int4" else width)
        return self.num_gpus * rate * self.shares.flops

    def _arithmetic_s(self, num_tokens: int) -> float:
        return 2.0 * self.shape.num_active_params * num_tokens / self._flops_per_s
