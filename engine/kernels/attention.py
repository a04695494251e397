"""Attention over the paged KV pool with Triton kernels.

Owns a step's plan and the order of a layer's launches. Slots that were never written are not read into a
result. On a CPU the kernels run in Triton's interpreter, for tests. Called on the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.kernels.decode_attention import decode_attention
from engine.kernels.jit import is_interpreted
from engine.kernels.kv_write import Rotation, kv_write
from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.paged_softmax import attend
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.tables import AttentionTiles, architecture, attention_tiles
from engine.kernels.work import StepWork, plan_work

_AS_THEY_ARE = Rotation()


class TritonPagedAttention:
    """An attention backend; see `engine.attention.AttentionBackend`."""

    def __init__(
        self,
        pool: torch.Tensor,
        num_heads: int,
        rules: Sequence[AttentionRule] = (),
        tiles: AttentionTiles | None = None,
    ) -> None:
        """`pool` is `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, contiguous.

        `rules` has one entry for each layer; without, a layer attends to all of its sequence. `tiles` are
        those of the tables if not given. Raises RuntimeError for a pool on the CPU when the kernels were not
        loaded for the interpreter.
        """
        num_layers, _, _, num_kv_heads, block_size, head_dim = pool.shape
        if pool.device.type == "cpu" and not is_interpreted(attend):
            raise RuntimeError(
                "Triton kernels run on a CPU only with TRITON_INTERPRET=1 set before they are loaded"
            )
        self.layers = [PagedKV(*layer.unbind(0)) for layer in pool.unbind(0)]
        self.rules = list(rules) or [AttentionRule(head_dim**-0.5)] * num_layers
        assert len(self.rules) == num_layers
        self.tiles = tiles or attention_tiles(architecture(pool.device), head_dim, pool.dtype, block_size)
        self._device = pool.device
        self._block_size = block_size
        self._tokens_per_tile = self.tiles.prefill.rows // (num_heads // num_kv_heads)
        assert self._tokens_per_tile > 0, "more query heads share a KV head than a tile has rows"

    def plan(self, batch: Batch) -> TritonAttentionStep:
        """The work of a step, shared by all layers; one copy to the device."""
        split = self.tiles.decode.split
        work = plan_work(batch, self._tokens_per_tile, split, self._block_size, self._device)
        return TritonAttentionStep(self, work)


class TritonAttentionStep:
    """One step's plan; a layer's keys and values are written before any of them is read."""

    def __init__(self, backend: TritonPagedAttention, work: StepWork) -> None:
        self._backend = backend
        self.work = work

    def run(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `engine.model.layers.Attention`: `q` and `k` are rotated already."""
        return self.run_rotated(layer_index, q, k, v, _AS_THEY_ARE)

    def run_rotated(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Norm and rotate `q` (in place) and `k`, store `k` and `v`, attend.

        `q [num_tokens, num_heads, head_dim]`, `k` and `v [num_tokens, num_kv_heads, head_dim]`, which may be
        parts of one tensor; returns the shape of `q`.
        """
        backend, work = self._backend, self.work
        kv, rule = backend.layers[layer_index], backend.rules[layer_index]
        kv_write(q, k, v, kv, work.slots, rotation)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if work.prefill is not None:
            prefill_attention(q, kv, out, work.prefill, rule, backend.tiles)
        for decode in work.decodes:
            decode_attention(q, kv, out, decode, rule, backend.tiles)
        return out
