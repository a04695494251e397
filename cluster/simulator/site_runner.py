"""SiteRunner: a worker's runner without tensors. A step takes its price, and draws an end as soon as it may.

Owns the KV cache of one worker, real in all but the bytes, and moves the worker's clock by what a step takes.
One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from cluster.simulator.events import SiteClock
from cluster.simulator.jitter import Draws
from cluster.simulator.sharing import Host
from cluster.simulator.step_price import StepPrice, features_of
from core.kv_layout import KVLayout
from core.worker_status import BlockEvent
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from engine.sampling import SampledColumns, SampledToken
from engine.sampling.sampled import no_tokens
from engine.step import ScheduledSequence, StepOutput, StepPlan

EOS = 0
VOCAB_SIZE = 1 << 31
_NO_TOKEN: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteModel:
    """What loops ask of a model."""

    eos_token_ids: frozenset[int] = frozenset({EOS})
    vocab_size: int = VOCAB_SIZE


class BytelessPool:
    """A `KVPool` for all who move blocks and do not look into them."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        """There are no bytes to write."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There are no bytes to copy."""

    def clear_slots(self, block_id: int, first_slot: int) -> None:
        """There are no bytes to clear."""


def new_cache(layout: KVLayout, num_blocks: int) -> KVCache:
    """An empty one, without bytes."""
    return KVCache(cast(KVPool, BytelessPool(layout, num_blocks)), BlockAllocator(num_blocks))


class SiteRunner:
    """Each step ends when it has begun, by the worker's own clock; where cores are shared, when the others'
    steps have let it. A sampled token is always an end of sequence: requests come with `min_tokens`, before
    which it does not count, so answers have the length that they are meant to have, and nobody knows it
    before.
    """

    is_overlapped = False

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        max_context: int,
        price: StepPrice,
        clock: SiteClock,
        draws: Draws,
        host: Host | None = None,
        cache: KVCache | None = None,
    ) -> None:
        """`draws`: how many times their price steps take. `host`: whose cores are shared with other workers;
        None: this one has cores of its own. `cache`: of the same worker in another role.
        """
        self.layout = layout
        self.max_context = max_context
        self.model_config = SiteModel()
        self.cache = cache or KVCache(
            cast(KVPool, BytelessPool(layout, num_blocks)), BlockAllocator(num_blocks)
        )
        self.num_steps = 0
        self.busy_s = 0.0
        self.price = price
        self.draws = draws
        self.last_plan: StepPlan | None = None
        self.num_shared_cores = 0 if host is None else host.num_cores
        self.was_beside: bool | None = False
        self._clock = clock
        self._host = host

    def listen(self, on_events: Callable[[tuple[BlockEvent, ...]], None]) -> None:
        """Who hears which blocks there are."""
        self.cache.allocator.on_events = on_events

    @property
    def is_shared(self) -> bool:
        """Whether a step's end depends on others, so that whoever takes it waits for that in a greenlet."""
        return self._host is not None

    def run(self, plan: StepPlan) -> StepOutput:
        """The step, from beginning to end."""
        began_at = self._clock.at
        seconds = self.price.seconds(features_of(plan)) * self.draws.step(plan)
        if self._host is None:
            self._clock.at += seconds
        else:
            self.was_beside = self._host.run(self, seconds, is_reading=bool(plan.chunks))
            self._clock.at = self._host.now()
        self.last_plan = plan
        self.note_steps(1, self._clock.at - began_at)
        num_streams = len(plan.streams)
        return StepOutput(
            sampled=tuple(map(_sampled, plan.chunks)),
            streams=_ends(num_streams) if num_streams else no_tokens(),
        )

    def note_steps(self, num_steps: int, seconds: float) -> None:
        """So many were taken."""
        self.num_steps += num_steps
        self.busy_s += seconds

    def start(self, plan: StepPlan) -> EndedStep:
        """The same, for whoever would do something else meanwhile."""
        return EndedStep(self.run(plan))


@dataclass(frozen=True, slots=True)
class EndedStep:
    """See `engine.running_step.RunningStep`."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def _ends(num: int) -> SampledColumns:
    return SampledColumns(np.full(num, EOS, dtype=np.int64), np.zeros(num), {})


def _sampled(item: ScheduledSequence) -> tuple[SampledToken, ...]:
    if not (item.is_sampled and item.reaches_end):
        return _NO_TOKEN
    samples = item.sample_indices or (item.sequence.sample_index,)
    return tuple(SampledToken(index, EOS, None, 0.0) for index in samples)
