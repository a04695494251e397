"""Scripted workers: they follow a tiny "model" whose every token is known, and fail when and how a test
says.

The token at a position depends on request seed, sample and position only, as with the real engine, so what
a client gets can be compared with the undisturbed answer whatever happened on the way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import xor
from typing import Any, TypeVar

from core.block_hash import BlockHash, digest_part, part_of
from core.clock import Deadline
from core.errors import ServingError, WorkerLost
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SnapshotJob,
    WatchEvent,
)
from core.kv_layout import KVLayout
from core.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob
from core.worker_status import Announcement, WorkerStatus
from router.config import RouterConfig
from router.decision import Decision
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.worker_table import WorkerTable
from router.workers import Worker
from tests.doubles import FakeTime, settle

T = TypeVar("T")

LAYOUT = KVLayout("toy", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
PrefillAct = Callable[[PrefillJob], ServingError | None]


def token_at(seed: int, sample_index: int, position: int) -> int:
    """The "model"."""
    return 100 + (seed * 31 + sample_index * 17 + position * 7) % 150


def answer(request: Request, sample_index: int) -> list[int]:
    """The undisturbed answer of one sample."""
    sampling = request.sampling
    return [token_at(sampling.seed, sample_index, index) for index in range(sampling.max_tokens)]


def new_request(
    max_tokens: int = 6, num_samples: int = 1, prompt_len: int = 10, **sampling: object
) -> Request:
    params = replace(SamplingParams(max_tokens=max_tokens, seed=5), **sampling)  # type: ignore[arg-type]
    prompt = tuple(range(3, 3 + prompt_len))
    return Request(RequestId("r-0"), prompt, params, num_samples=num_samples)


def _delta(request: Request, sample_index: int, position: int) -> TokenDelta:
    sampling = request.sampling
    if sampling.max_tokens == 0:
        return TokenDelta(sample_index, 0, finish_reason=FinishReason.LENGTH)
    token = token_at(sampling.seed, sample_index, position)
    is_end = token in sampling.stop_token_ids
    reason = FinishReason.STOP if is_end else None
    if not is_end and position + 1 >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    logprobs = () if sampling.logprobs is None else (TokenLogprob(token, -0.25, ((token, -0.25),)),)
    return TokenDelta(sample_index, position, (token,), logprobs, reason)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob, ...]:
    if request.sampling.prompt_logprobs is None:
        return ()
    return tuple(TokenLogprob(token, -1.0, ((token, -1.0),)) for token in request.prompt_token_ids[1:])


def new_status(ref: WorkerRef, **fields: Any) -> WorkerStatus:
    """An idle worker with room for 64 blocks, unless said otherwise."""
    counts = {"num_waiting": 0, "num_running": 0, "num_waiting_tokens": 0, "num_running_tokens": 0}
    blocks = {"num_blocks": 64, "num_free_blocks": 64, "num_cached_blocks": 0, "num_held_blocks": 0}
    rest = {"num_quarantined_blocks": 0, "max_num_seqs": 8, "is_draining": False}
    return WorkerStatus(**{"ref": ref, **counts, **blocks, **rest, **fields})


@dataclass(eq=False)
class ScriptedWorker:
    """One worker. `on_prefill` may return an error to raise; `break_at[position]` errors end streams there.

    `hold` (an event) makes prefills wait, `hold_loans` what it lends; `pause_at` makes streams wait before
    that position until `resume` is set.
    """

    role: Role
    name: str
    epoch: int = 1
    status: WorkerStatus | None = None
    hashes: tuple[BlockHash, ...] = ()
    number: int = 0
    on_prefill: PrefillAct | None = None
    on_generate: Callable[[GenerateJob], ServingError | None] | None = None
    on_lend: Callable[[LendJob], ServingError | None] | None = None
    break_at: dict[int, ServingError] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    hold_loans: asyncio.Event | None = None
    pause_at: int | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    num_cached_tokens: int = 0
    num_blocks: int = 512 // LAYOUT.block_size
    prefills: list[PrefillJob] = field(default_factory=list)
    generates: list[GenerateJob] = field(default_factory=list)
    loans: list[LendJob] = field(default_factory=list)
    cancels: list[CancelJob] = field(default_factory=list)
    snapshots: list[SnapshotJob] = field(default_factory=list)
    num_open_calls: int = 0
    num_watches: int = 0
    is_dead: bool = False
    is_silent: bool = False
    is_closed: bool = False
    exposition: bytes = b""
    process_epoch: int = 0

    def __post_init__(self) -> None:
        self.ref = WorkerRef(WorkerId(self.name), self.role, Epoch(self.epoch), f"loopback:{self.name}")
        self._death = asyncio.Event()
        self._watch_events: asyncio.Queue[WatchEvent | None] = asyncio.Queue()

    def announcement(self) -> Announcement:
        num_blocks = self.status.num_blocks if self.status is not None else self.num_blocks
        line = Announcement(self.ref, "toy", LAYOUT, 512, 1, "here", self.role.value, num_blocks)
        return replace(line, process_epoch=Epoch(self.process_epoch))

    @property
    def block_epoch(self) -> Epoch:
        return self.announcement().block_epoch

    def die(self) -> None:
        """As by SIGKILL: every connection breaks."""
        self.is_dead = True
        self._death.set()

    def beat(self) -> None:
        """Give a sign of life, as a worker does each second."""
        self.tell(WatchEvent(0, status=self.status or new_status(self.ref)))

    def tell(self, event: WatchEvent) -> None:
        self._watch_events.put_nowait(replace(event, epoch=self.block_epoch))

    def end_watch(self) -> None:
        """End the Watch as a worker does: without an error."""
        self._watch_events.put_nowait(None)

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        self._check_alive()
        self.prefills.append(job)
        self.num_open_calls += 1
        try:
            if self.hold is not None:
                await self._or_death(self.hold.wait())
            error = self.on_prefill(job) if self.on_prefill is not None else None
            if error is not None:
                raise error
            deltas = tuple(
                _delta(job.request, sample.sample_index, len(sample.emitted)) for sample in job.samples
            )
            return PrefillResult(deltas, self.num_cached_tokens, 0.0, 0.0, _prompt_logprobs(job.request))
        finally:
            self.num_open_calls -= 1

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        self._check_alive()
        self.generates.append(job)
        self.num_open_calls += 1
        try:
            error = self.on_generate(job) if self.on_generate is not None else None
            if error is not None:
                raise error
            async for event in self._tokens(job):
                yield event
        finally:
            self.num_open_calls -= 1

    async def _tokens(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        positions = {sample.sample_index: len(sample.emitted) for sample in job.samples}
        prompt_logprobs = _prompt_logprobs(job.request) if job.ticket_id is None else ()
        while positions:
            for sample_index, position in sorted(positions.items()):
                if position in self.break_at:
                    raise self.break_at.pop(position)
                if position == self.pause_at:
                    await self._or_death(self.resume.wait())
                delta = _delta(job.request, sample_index, position)
                yield GenerateEvent(delta, prompt_logprobs)
                prompt_logprobs = ()
                positions[sample_index] += 1
                if delta.finish_reason is not None:
                    del positions[sample_index]
            await self._or_death(asyncio.sleep(0))

    async def lend(self, job: LendJob) -> LendResult:
        self._check_alive()
        self.loans.append(job)
        self.num_open_calls += 1
        try:
            if self.hold_loans is not None:
                await self._or_death(self.hold_loans.wait())
            error = self.on_lend(job) if self.on_lend is not None else None
            if error is not None:
                raise error
            return LendResult(len(job.block_hashes) * LAYOUT.block_size, len(job.block_hashes))
        finally:
            self.num_open_calls -= 1

    async def cancel(self, job: CancelJob) -> None:
        self._check_alive()
        self.cancels.append(job)

    async def watch(self) -> AsyncIterator[WatchEvent]:
        self._check_alive()
        self.num_watches += 1
        digest = (len(self.hashes), reduce(xor, map(digest_part, self.hashes), 0))
        yield WatchEvent(0, status=self.status, digest=digest, epoch=self.block_epoch)
        while (event := await self._or_death(self._watch_events.get())) is not None:
            yield event

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        """All that it holds, in one page."""
        self._check_alive()
        self.snapshots.append(job)
        parts = range(job.first_part, job.end_part)
        told = tuple(block_hash for block_hash in self.hashes if part_of(block_hash) in parts)
        return BlockPage(self.block_epoch, self.number, parts.start, parts.stop, tuple(parts), told)

    async def metrics(self) -> bytes:
        self._check_alive()
        return self.exposition

    async def close(self) -> None:
        self.is_closed = True

    def _check_alive(self) -> None:
        if self.is_dead:
            raise self._lost()

    def _lost(self) -> WorkerLost:
        return WorkerLost("the connection broke", worker_id=self.ref.worker_id)

    async def _or_death(self, wait: Coroutine[Any, Any, T]) -> T:
        work, death = asyncio.ensure_future(wait), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self._lost()
            return work.result()
        finally:
            work.cancel()
            death.cancel()


class Collector:
    """A Reader that keeps what it reads and has enough of a sample after `enough[sample_index]` tokens."""

    def __init__(self, enough: dict[int, int] | None = None) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.events: list[GenerateEvent] = []
        self.reasons: dict[int, FinishReason] = {}
        self.decisions: list[Decision] = []
        self.losses: list[tuple[int, ...]] = []
        self._enough = enough or {}

    def placed(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def pulled(self) -> None:
        """Nothing to note."""

    def lost(self, samples: Sequence[int]) -> None:
        self.losses.append(tuple(samples))

    def read(self, event: GenerateEvent) -> bool:
        delta = event.delta
        tokens = self.tokens.setdefault(delta.sample_index, [])
        assert delta.position == len(tokens), "a gap or a repetition"
        assert delta.sample_index not in self.reasons, "news after the end"
        tokens += delta.token_ids
        self.events.append(event)
        if delta.finish_reason is not None:
            self.reasons[delta.sample_index] = delta.finish_reason
        return len(tokens) >= self._enough.get(delta.sample_index, 1 << 30)


class Fleet:
    """Scripted workers, and a table and a pipeline on them, under a clock that tests move."""

    def __init__(self, *workers: ScriptedWorker, time: FakeTime | None = None, **settings: Any) -> None:
        self.workers = list(workers)
        self.listed = list(workers)
        self.is_membership_known = True
        self.time = time or FakeTime()
        self.config = RouterConfig(**settings)
        self.metrics = RouterMetrics()
        self.table = WorkerTable(self.config, self, self.connect, self.time, self.time.sleep)
        self.pipeline = Pipeline(
            self.config, self.table, self.metrics, self.time, random.Random(1), self.time.sleep
        )

    async def announcements(self) -> tuple[Announcement, ...]:
        if not self.is_membership_known:
            raise ConnectionError("the registry does not answer")
        return tuple(worker.announcement() for worker in self.listed)

    def connect(self, ref: WorkerRef) -> Worker:
        return next(worker for worker in self.workers if worker.ref == ref)

    def join(self, worker: ScriptedWorker) -> None:
        """A worker comes; it is found at the next poll. A former incarnation of its name leaves the list."""
        self.workers.append(worker)
        self.listed = [other for other in self.listed if other.name != worker.name] + [worker]

    async def pass_by(self, seconds: float) -> None:
        """Time passes; workers that are not silent give their signs of life."""
        end = self.time.now() + seconds
        while (left := end - self.time.now()) > 1e-9:
            for worker in self.workers:
                if not (worker.is_dead or worker.is_silent):
                    worker.beat()
            await self.time.pass_by(min(0.5, left))

    async def __aenter__(self) -> Fleet:
        await self.table.start()
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pipeline.stop()
        await self.table.stop()

    def begin(
        self, request: Request, reader: Collector | None = None, timeout_s: float = 60.0
    ) -> tuple[asyncio.Task[None], Collector]:
        """The request under way, and its reader."""
        reader = reader or Collector()
        deadline = Deadline.after(timeout_s, self.time)
        return asyncio.create_task(self.pipeline.serve(request, reader, deadline)), reader

    async def serve(self, request: Request, reader: Collector | None = None) -> Collector:
        """The request served to its end without the clock moving."""
        task, reader = self.begin(request, reader)
        await task
        return reader
