"""A decode worker's step loop without threads, with a clock moved by hand, and the KV of prompts to feed
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from core.block_hash import hash_blocks
from core.clock import Deadline
from core.errors import ServingError
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef
from core.jobs import GenerateEvent, GenerateJob, SampleStart
from core.request import FinishReason, Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.decode_loop import DecodeLoop
from decode_worker.metrics import TicketMetrics
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, PlainToken, Stream
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel
from engine.metrics import EngineMetrics
from engine.runner import ModelRunner
from engine.sequence import new_sequence
from engine.step import ScheduledSequence, StepPlan
from tests.doubles import FakeClock
from tests.oracle import oracle_greedy

PREFILL = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "loopback:p")
DECODE = WorkerRef(WorkerId("d"), Role.DECODE, Epoch(2), "loopback:d")
MAX_TOKENS = 6


@dataclass(frozen=True)
class Prompt:
    """A prompt as prefill has read it: its blocks' bytes, its first token, and the whole right answer."""

    request: Request
    ticket: HandoffTicket
    blocks: tuple[bytes, ...]
    first_token: int
    answer: tuple[int, ...]

    def job(self, attempt: int = 0, time_left_s: float = 60.0, *, is_resumed: bool = True) -> GenerateJob:
        emitted = (self.first_token,) if is_resumed else ()
        samples = (SampleStart(0, emitted),)
        return GenerateJob(self.request, samples, self.ticket.ticket_id, attempt, time_left_s)


@dataclass
class Heard:
    """What a stream got, as a listener would put it together."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    is_ended: bool = False

    def add_token(self, token: GenerateEvent | PlainToken, num_emitted: int) -> None:
        assert not self.is_ended, "something came after the end"
        assert isinstance(token, tuple)
        _, position, token_id, _ = token
        assert position == num_emitted + len(self.token_ids), "a token is missing or came twice"
        self.token_ids.append(token_id)

    def add(self, delivery: Delivery, num_emitted: int) -> None:
        assert not self.is_ended, "something came after the end"
        for event in delivery.events:
            assert event.delta.position == num_emitted + len(self.token_ids), (
                "a token is missing or came twice"
            )
            self.token_ids += event.delta.token_ids
            self.finish_reason = event.delta.finish_reason
        self.error = delivery.error
        self.is_ended = delivery.is_end or delivery.error is not None


class DecodeSite:
    """The loop under test. Every command is followed by the check of all block holders."""

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        num_kv_blocks: int = 24,
        overlap: Literal["on", "off"] = "off",
        **config: Any,
    ) -> None:
        self.folder = folder
        self.clock = FakeClock()
        engine = EngineConfig(model=str(folder), num_kv_blocks=num_kv_blocks, block_size=4, threads=1)
        self.runner = ModelRunner(loaded, replace(engine, overlap=overlap))
        self._prefill = ModelRunner(
            loaded, EngineConfig(model=str(folder), num_kv_blocks=64, block_size=4, threads=1)
        )
        registry = self._registry = CollectorRegistry()
        self.loop = DecodeLoop(
            self.runner,
            DecodeConfig(**config),
            DECODE,
            self.clock,
            self._deliver,
            EngineMetrics(registry, Role.DECODE),
            TicketMetrics(registry),
        )
        self._heard: dict[Stream, Heard] = {}
        self._num_emitted: dict[Stream, int] = {}

    def prompt(self, ids: Sequence[int], name: str, num_growth_tokens: int = 4) -> Prompt:
        """Read a prompt as prefill would."""
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=1, temperature=0.0)
        request = Request(RequestId(name), tuple(ids), params)
        cache = self._prefill.cache
        sequence = new_sequence(request, 0, (), self._prefill.max_context)
        assert cache.try_start(sequence)
        output = self._prefill.run(StepPlan((ScheduledSequence(sequence, sequence.num_uncomputed_tokens),)))
        blocks = tuple(bytes(cache.pool.read_blocks([block_id])) for block_id in sequence.block_table)
        cache.release(sequence)
        ticket = HandoffTicket(
            ticket_id=TicketId(f"ticket-{name}"),
            request_id=request.request_id,
            prefill=PREFILL,
            decode=DECODE,
            layout=self.runner.layout,
            num_tokens=len(ids),
            block_hashes=tuple(hash_blocks(cache.hash_root(request), ids, 4)),
            num_growth_tokens=num_growth_tokens,
        )
        answer = tuple(oracle_greedy(self.folder, ids, MAX_TOKENS, eos=(2,)))
        assert output.sampled[0][0].token_id == answer[0]
        return Prompt(request, ticket, blocks, answer[0], answer)

    @property
    def num_live_tickets(self) -> float:
        """As the gauges say since the last tick."""
        families = {family.name: family for family in self._registry.collect()}
        return sum(sample.value for sample in families["baton_tickets"].samples)

    # ------------------------------------------------------------ messages

    def offer(self, prompt: Prompt, time_left_s: float = 60.0) -> tuple[int, ...]:
        return self._checked(lambda: self.loop.offer(prompt.ticket, time_left_s))

    def write(self, prompt: Prompt, index: int) -> None:
        self._checked(lambda: self.loop.write(prompt.ticket.ticket_id, index, 1, prompt.blocks[index]))

    def commit(self, prompt: Prompt, num_pushed: int) -> None:
        num_tokens = prompt.ticket.num_tokens
        self._checked(lambda: self.loop.commit(prompt.ticket.ticket_id, num_tokens, num_pushed))

    def abort(self, prompt: Prompt) -> None:
        self._checked(lambda: self.loop.abort(prompt.ticket.ticket_id, "test", 60.0))

    def keepalive(self, prompt: Prompt) -> None:
        self._checked(lambda: self.loop.keepalive(prompt.ticket.ticket_id))

    def begin(self, job: GenerateJob) -> Heard:
        stream = Stream(job)
        heard = self._heard[stream] = Heard()
        self._num_emitted[stream] = len(job.samples[0].emitted)
        deadline = Deadline.after(job.time_left_s, self.clock)
        self._checked(lambda: self.loop.begin(job, stream, deadline))
        return heard

    # ------------------------------------------------------------ time

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at the end."""
        self.clock.advance(seconds)
        self._checked(self.loop.tick)

    def run(self, until: Callable[[], bool], max_steps: int = 2000) -> None:
        """Step, with a tenth of a second for each, until the condition holds."""
        for _ in range(max_steps):
            if until():
                return
            self._checked(self.loop.step)
            self.wait(0.1)
        raise AssertionError("it hangs")

    def _checked(self, command: Callable[[], Any]) -> Any:
        try:
            return command()
        finally:
            self.loop.check()

    def _deliver(self, deliveries: Sequence[Delivery], tokens: Sequence[StepTokens]) -> None:
        for columns in tokens:
            for stream, token in columns.rows():
                self._heard[stream].add_token(token, self._num_emitted[stream])
        for delivery in deliveries:
            self._heard[delivery.stream].add(delivery, self._num_emitted[delivery.stream])
