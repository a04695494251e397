"""DecodeGraphs: decode steps recorded once at start and replayed, padded to one of a few sizes.

Owns the sizes, the inputs at fixed addresses, and the padding: a row without a sequence repeats the first row
but has no slot to write its keys to, and its result is cut off. What a recording is stands behind `Recorder`:
a CUDA graph on a GPU, the plain call elsewhere. Used on the step thread.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from engine.batch import Batch, Ints
from engine.gpu.decode_inputs import DecodeInputs, DecodeShape
from engine.kernels.attention import TritonAttentionStep, TritonPagedAttention
from engine.kernels.work import StepWork, plan_work
from engine.model.transformer import Transformer
from engine.token_feed import TokenFeed

_GROWTH = 4
"""From one number of attention's splits to the next that is recorded: a launch has that many times its work
at most, in programs that end at once.
"""

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """How work of fixed shapes and addresses is kept to be repeated."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run`; it may have been run meanwhile."""
        ...


class CallRecorder:
    """Repeats by calling: for devices without graphs."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class GraphRecorder:
    """CUDA graphs that share one pool of memory, since they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs once before: kernels are compiled and libraries made ready outside of the recording."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            run()
        return graph.replay


class DecodeGraphs:
    """Recorded forwards of 1 to `max_sequences` sequences with one new token each."""

    def __init__(
        self,
        model: Transformer,
        attention: TritonPagedAttention,
        feed: TokenFeed,
        max_sequences: int,
        max_context: int,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        layer = attention.layers[0]
        self._model = model
        self._attention = attention
        self._feed = feed
        self._block_size = layer.block_size
        self._split = attention.tiles.decode.split
        max_blocks = -(-max_context // layer.block_size)
        max_splits = -(-max_context // self._split)
        # a pool holds no more splits than this, unless sequences share blocks: those steps are not replayed
        num_held = layer.keys.shape[0] * layer.block_size // self._split
        self._shapes = {
            size: [
                DecodeShape(size, capacity, max_blocks)
                for capacity in split_capacities(size, min(size * max_splits, size + num_held))
            ]
            for size in padded_sizes(max_sequences)
        }
        self._sizes = list(self._shapes)
        self._inputs = DecodeInputs([shapes[-1] for shapes in self._shapes.values()], device)
        self._hidden = torch.zeros(
            (self._sizes[-1], model.config.hidden_size), dtype=torch.float32, device=device
        )
        self._recorder = recorder
        self._replays: dict[DecodeShape, Callable[[], None]] = {}

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record each shape, the largest first: the others find their memory in its."""
        shapes = [shape for size in reversed(self._sizes) for shape in reversed(self._shapes[size])]
        for shape in shapes:
            self._inputs.clear(shape)
            self._replays[shape] = self._recorder.record(self._body(shape))
        _log.info("%d shapes of decode steps are recorded", len(shapes))

    def forward(self, batch: Batch, feed_slots: Ints | None) -> torch.Tensor | None:
        """The residual stream `[num_tokens, hidden_size]`, valid until the next call; None if no recording
        fits the batch.
        """
        num_sequences = len(batch.num_new)
        if num_sequences > self._sizes[-1] or batch.num_tokens != num_sequences:
            return None
        # 1 token per tile: there is no prefill, so it is never used
        work = plan_work(batch, 1, self._split, self._block_size, torch.device("cpu"))
        shape = self._fitting(num_sequences, len(work.decodes[0].items))
        if shape is None or shape not in self._replays:
            return None
        self._inputs.fill(shape, batch, work, feed_slots)
        self._replays[shape]()
        return self._hidden[:num_sequences]

    def _fitting(self, num_sequences: int, num_splits: int) -> DecodeShape | None:
        size = self._sizes[bisect.bisect_left(self._sizes, num_sequences)]
        return next((shape for shape in self._shapes[size] if shape.capacity >= num_splits), None)

    def _body(self, shape: DecodeShape) -> Callable[[], None]:
        inputs = self._inputs.on_device(shape)

        def run() -> None:
            token_ids = self._feed.resolve(inputs.token_ids, inputs.feed_slots)
            work = StepWork(None, (inputs.decode_work(self._split),), inputs.slots)
            step = TritonAttentionStep(self._attention, work)
            self._hidden[: shape.size].copy_(self._model.forward(token_ids, inputs.positions, step))

        return run


def padded_sizes(max_sequences: int) -> list[int]:
    """Numbers of rows that steps are padded to: 1, 2, 4, 8, 16, 24, 32, …, `max_sequences`."""
    sizes = {1, 2, 4, 8, *range(16, max_sequences, 8), max_sequences}
    return sorted(size for size in sizes if size <= max_sequences)


def split_capacities(size: int, max_splits: int) -> list[int]:
    """Numbers of attention's splits that a step of `size` rows has room for, up to `max_splits`."""
    capacities = []
    capacity = size
    while capacity < max_splits:
        capacities.append(capacity)
        capacity *= _GROWTH
    return [*capacities, max_splits]
