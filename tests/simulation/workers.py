"""Sites: a prefill or decode worker in a process of its own, and how router and bridge reach it.

The workers are the real ones, `PrefillWorker` and `DecodeWorker`, with their loops, schedulers, outbox,
inbox, feed, sender and receiver; only their step thread, their device and the wires are the simulation's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from cluster.config import BatonConfig, ClusterConfig
from cluster.role_config import RoleConfig
from cluster.role_worker import RoleWorker, Surroundings
from cluster.workers import AnyWorker
from core.awake import PERIOD_S, Awake
from core.clock import Clock
from core.errors import StaleEpoch, WorkerLost
from core.handoff import HandoffTicket, TicketState
from core.ids import Epoch, Role, TicketId, WorkerId, WorkerRef
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
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from kv_transfer.receiver import Receiver
from kv_transfer.transport import Carriage, CommitClaim, CommitReceipt, Fence, Pair, Room
from prefill_worker.config import PrefillConfig
from tests.simulation.chain_model import chain_runner
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.steps import LoopSteps

ROLES = RoleConfig(settle_s=2.0, drain_s=0.3)


class Site:
    """One process with a worker in it."""

    def __init__(self, either: RoleWorker, process: Process) -> None:
        self.either = either
        self.process = process

    @property
    def worker(self) -> AnyWorker:
        """What it runs at present."""
        return self.either.current

    @property
    def ref(self) -> WorkerRef:
        return self.either.ref

    @property
    def receiver(self) -> Receiver:
        return self.worker.receiver

    def num_tickets(self, state: TicketState) -> int:
        """Those that are in `state` here and have not ended."""
        worker = self.worker
        if isinstance(worker, DecodeWorker):
            return worker._loop._inbox.num_by_state()[state]
        return worker._loop._outbox.num_by_state()[state]


class Directory:
    """Who listens at which address; a new process may inherit the address of a dead one."""

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}

    def register(self, site: Site) -> None:
        self._sites[site.ref.address] = site

    def find(self, address: str) -> Site:
        return self._sites[address]


class SiteMaker:
    """Makes sites of one world."""

    def __init__(
        self,
        network: Network,
        directory: Directory,
        clock: Clock,
        num_blocks: int,
        faults: list[str],
        errors: list[str],
    ) -> None:
        self._network = network
        self._directory = directory
        self._clock = clock
        self._num_blocks = num_blocks
        self._faults = faults
        self._errors = errors

    async def make(self, name: str, role: Role, epoch: int, address: str) -> Site:
        """A worker that serves."""
        process = Process(f"{name}#{epoch}", self._errors)
        ref = WorkerRef(WorkerId(name), role, Epoch(epoch), address)
        chance, runner = self._network.chance, chain_runner(self._num_blocks, self._faults)

        def new_steps(
            title: str, step: Callable[[], bool], on_tick: Callable[[], None], **_: Callable[[], float]
        ) -> Any:
            return LoopSteps(process, lambda: 0.001 + chance.random() * 0.02, step, on_tick)

        def connect(target: WorkerRef) -> SimTransport:
            return SimTransport(self._network, self._directory, process, target)

        prefill, decode = PrefillConfig(token_budget=16, max_num_seqs=4), DecodeConfig(max_num_seqs=8)
        if role is Role.PREFILL:
            prefill = replace(prefill, token_budget=chance.choice((8, 16, 64)))
        else:
            budget = chance.choice((16, 64))
            decode = replace(decode, token_budget=budget, prefill_chunk=chance.choice((4, 16)))
        config = BatonConfig(prefill=prefill, decode=decode, cluster=ClusterConfig(roles=ROLES))
        awake = Awake(self._clock)
        process.spawn(_watch(process, awake))
        surroundings = Surroundings(connect=lambda wanted: connect, new_steps=new_steps, awake=awake)
        worker = RoleWorker(runner, config, ref, self._clock, surroundings)
        await worker.start()
        site = Site(worker, process)
        self._directory.register(site)
        return site


async def _watch(process: Process, awake: Awake) -> None:
    """The process's look at itself, which comes late if it is stopped."""
    while True:
        awake.look()
        await asyncio.sleep(PERIOD_S)
        await process.while_stopped()


class SimWorker:
    """A worker as the router holds it: a `router.workers.Worker`."""

    def __init__(self, network: Network, directory: Directory, router: Process, ref: WorkerRef) -> None:
        self._network = network
        self._directory = directory
        self._router = router
        self._ref = ref
        self._is_closed = False

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        result: PrefillResult = await self._call(lambda worker: worker.prefill(job))
        return result

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        async for event in self._stream(lambda worker: worker.generate(job)):
            yield event

    async def lend(self, job: LendJob) -> LendResult:
        result: LendResult = await self._call(lambda worker: worker.lend(job))
        return result

    async def cancel(self, job: CancelJob) -> None:
        site = self._site()
        await self._network.idempotent(
            self._router, site.process, lambda: self._checked(site, lambda worker: worker.cancel(job))
        )

    async def watch(self) -> AsyncIterator[WatchEvent]:
        async for event in self._stream(lambda worker: worker.watch()):
            yield event

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        page: BlockPage = await self._call(lambda worker: worker.snapshot(job))
        return page

    async def metrics(self) -> bytes:
        text: bytes = await self._call(lambda worker: worker.metrics())
        return text

    async def close(self) -> None:
        self._is_closed = True

    def _site(self) -> Site:
        if self._is_closed:
            raise WorkerLost("the connection is closed", worker_id=self._ref.worker_id)
        return self._directory.find(self._ref.address)

    async def _call(self, act: Callable[[AnyWorker], Coroutine[Any, Any, Any]]) -> Any:
        site = self._site()
        return await self._network.call(self._router, site.process, lambda: self._checked(site, act))

    async def _checked(self, site: Site, act: Callable[[AnyWorker], Awaitable[Any]]) -> Any:
        self._check_epoch(site)
        return await act(site.worker)

    async def _stream(self, act: Callable[[AnyWorker], AsyncIterator[Any]]) -> AsyncIterator[Any]:
        site = self._site()

        def opened() -> AsyncIterator[Any]:
            self._check_epoch(site)
            return act(site.worker)

        stream = self._network.stream(self._router, site.process, opened)
        try:
            async for item in stream:
                yield item
        finally:
            await stream.aclose()

    def _check_epoch(self, site: Site) -> None:
        if site.ref.epoch != self._ref.epoch:
            raise StaleEpoch("another incarnation listens here", worker_id=self._ref.worker_id)


class SimTransport:
    """The bridge between two processes: a `kv_transfer.transport.Transport`."""

    name = "loopback"
    carriage = Carriage(name)

    def __init__(self, network: Network, directory: Directory, source: Process, ref: WorkerRef) -> None:
        self._network = network
        self._directory = directory
        self._source = source
        self._ref = ref

    async def meet(self, pair: Pair) -> None:
        """There is nothing to be made ready."""

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        receiver = self._site().receiver
        epoch = ticket.decode.epoch
        held: tuple[int, ...] = await self._idempotent(lambda: receiver.offer(ticket, time_left_s, epoch))
        return held

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        receiver = self._site().receiver
        receipt: CommitReceipt = await self._idempotent(lambda: receiver.commit(fence, claim))
        return receipt

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        receiver = self._site().receiver
        await self._idempotent(lambda: receiver.abort(fence, reason, time_left_s))

    async def keepalive(self, fence: Fence) -> None:
        receiver = self._site().receiver
        await self._idempotent(lambda: receiver.keepalive(fence))

    async def open_push(self) -> SimPush:
        return SimPush(self._network, self._source, self._site())

    async def close(self) -> None:
        """Nothing is held open between calls."""

    def _site(self) -> Site:
        return self._directory.find(self._ref.address)

    async def _idempotent(self, handler: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self._network.idempotent(self._source, self._site().process, handler)


class SimPush:
    """Frames in order to one incarnation, acknowledgements back; a byte may change on the way."""

    def __init__(self, network: Network, source: Process, site: Site) -> None:
        self._network = network
        self._source = source
        self._site = site
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._acks = network.stream(source, site.process, self._served)

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        """Payloads travel in their frames."""
        return None

    async def send(self, frame: bytes) -> None:
        await self._network.carry(self._source, self._site.process)
        network = self._network
        if network.happens(network.weather.broken):
            raise WorkerLost("the connection broke", worker_id=self._site.process.name)
        if network.happens(network.weather.corrupt):
            garbled = bytearray(frame)
            garbled[network.chance.randrange(len(frame))] ^= 1 << network.chance.randrange(8)
            frame = bytes(garbled)
        self._frames.put_nowait(frame)
        if network.happens(network.weather.repeated):
            self._frames.put_nowait(frame)

    async def acks(self) -> AsyncIterator[bytes]:
        async for ack in self._acks:
            yield ack

    async def close(self) -> None:
        self._frames.put_nowait(None)
        await self._acks.aclose()

    async def _served(self) -> AsyncIterator[bytes]:
        acks: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def serve() -> None:
            try:
                await self._site.receiver.push(self._incoming(), acks.put, SimTransport.name)
            finally:
                acks.put_nowait(None)

        serving = self._site.process.spawn(serve())
        try:
            while (ack := await acks.get()) is not None:
                yield ack
        finally:
            serving.cancel()

    async def _incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self._frames.get()) is not None:
            yield frame
