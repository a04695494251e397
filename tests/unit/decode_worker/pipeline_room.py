"""A pipeline with the real scheduler, cache and generations over a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import Cancelled, ServingError
from core.ids import Role
from core.jobs import SampleStart
from core.request import FinishReason, Request
from decode_worker.config import DecodeConfig
from decode_worker.generation import Generation
from decode_worker.generations import Generations
from decode_worker.scheduler import Scheduler
from decode_worker.step_pipeline import StepPipeline
from decode_worker.stream import Stream
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from engine.metrics import EngineMetrics
from tests.doubles import FakeClock
from tests.unit.decode_worker.decode_cases import LAYOUT, MAX_CONTEXT, make_job
from tests.unit.decode_worker.simulated_device import SimulatedDevice, answer_of


class Heard:
    """What one stream was told: `tokens` and `reasons` by sample."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.request = generation.job.request
        self.tokens = {sample.sample_index: list(sample.emitted) for sample in generation.job.samples}
        self.reasons: dict[int, FinishReason] = {}
        self.error: ServingError | None = None
        self.is_ended = False

    def add(self, sample_index: int, position: int, token_ids: Iterable[int]) -> None:
        assert not self.is_ended
        assert sample_index not in self.reasons, "a token after the end"
        assert position == len(self.tokens[sample_index])
        self.tokens[sample_index] += token_ids


class SimulatedPool(KVPool):
    """Copies are made where the content is."""

    content: SimulatedDevice

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.content.copy(source, target)


class Room:
    def __init__(self, num_blocks: int = 64, *, is_overlapped: bool = True, max_num_seqs: int = 8) -> None:
        self.clock = FakeClock()
        self.device = SimulatedDevice(LAYOUT, self.clock, is_overlapped)
        pool = SimulatedPool(LAYOUT, num_blocks)
        pool.content = self.device
        self.cache = KVCache(pool, BlockAllocator(num_blocks))
        config = DecodeConfig(
            max_num_seqs=max_num_seqs, token_budget=16, prefill_chunk=6, watermark=0.0, max_waiting=100
        )
        metrics = EngineMetrics(CollectorRegistry(), Role.DECODE, "toy")
        eos: frozenset[int] = frozenset()
        self.scheduler = Scheduler(config, self.cache, eos)
        self.generations = Generations(
            config, self.scheduler, self.cache, eos, MAX_CONTEXT, metrics, self.clock
        )
        self.pipeline = StepPipeline(
            self.device, self.scheduler, self.generations, self.clock, metrics, self.generations.end
        )
        self.heard: dict[Stream, Heard] = {}

    def open(self, request: Request, num_emitted: int = 0) -> Heard:
        """`num_emitted`: the client has so many tokens already."""
        job = make_job(request)
        if num_emitted:
            starts = (
                SampleStart(index, tuple(expected_of(request, index)[:num_emitted]))
                for index in range(request.num_samples)
            )
            job = replace(job, samples=tuple(starts))
        stream = Stream(job)
        generation = self.generations.open(job, stream, Deadline(1e9))
        self.heard[stream] = Heard(generation)
        self.generations.start_here(generation)
        self.collect()
        return self.heard[stream]

    def cancel(self, heard: Heard) -> None:
        if not heard.is_ended:
            self.generations.end(heard.generation, Cancelled("test"))
            self.collect()

    def step(self) -> bool:
        is_done = self.pipeline.advance(0)
        self.collect()
        return is_done

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(2000):
            if until() or not self.step():
                return
        raise AssertionError("it hangs")

    def collect(self) -> None:
        for columns in self.generations.take_tokens():
            for stream, token in columns.rows():
                assert isinstance(token, tuple)
                self.heard[stream].add(token[0], token[1], (token[2],))
        for delivery in self.generations.take_deliveries()[0]:
            heard = self.heard[delivery.stream]
            for event in delivery.events:
                delta = event.delta
                heard.add(delta.sample_index, delta.position, delta.token_ids)
                if delta.finish_reason is not None:
                    heard.reasons[delta.sample_index] = delta.finish_reason
            heard.error = delivery.error
            heard.is_ended = delivery.is_end or delivery.error is not None
        self.check()

    def check(self) -> None:
        self.scheduler.check()
        self.cache.allocator.check(self.scheduler.tables())

    def check_answers(self) -> None:
        """Each stream has its answer, or the beginning of it where it was cancelled."""
        for heard in self.heard.values():
            for sample_index, tokens in heard.tokens.items():
                expected = expected_of(heard.request, sample_index)
                if heard.error is not None:
                    assert tokens == expected[: len(tokens)]
                else:
                    assert tokens == expected
                    assert sample_index in heard.reasons

    def num_rows(self, heard: Heard) -> int:
        """Stream rows that were computed for the request."""
        sequences = chain.from_iterable(plan.streams.sequences for plan in self.device.plans)
        return sum(sequence.request is heard.request for sequence in sequences)


def expected_of(request: Request, sample_index: int = 0) -> list[int]:
    sampling = request.sampling
    ends = frozenset(sampling.stop_token_ids)
    return answer_of(request.prompt_token_ids, sample_index, sampling.max_tokens, ends)
