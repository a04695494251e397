"""Whatever is lost, late, doubled, reordered or restarted: once it is quiet the index is what workers hold,
and asking it never fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_hash import BlockHash
from core.ids import WorkerId
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockTier
from router.predictions import Prediction
from router.prefix_index import PrefixIndex
from tests.doubles import FakeClock
from tests.unit.router.told_worker import (
    CLEARED,
    ToldWorker,
    block,
    deliver,
    removed,
    repair,
    stored,
    view_of,
)

# few parts with several blocks each, first and last among them
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes longer than a test may
NAMES = [block(part, number) for part in (0, 1, 700, 2048, 4095) for number in range(5)]
WORKERS = ("a", "b")

names = st.sampled_from(NAMES)
workers = st.sampled_from(WORKERS)
picks = st.integers(0, 1000)
tiers = st.sampled_from([BlockTier.DEVICE, BlockTier.DEVICE, BlockTier.HOST])


class IndexUnderFire(RuleBasedStateMachine):
    """Messages and pages wait in transit until a rule delivers, doubles or loses them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.index = PrefixIndex(self.clock)
        self.workers: dict[str, ToldWorker] = {}
        self.former: list[ToldWorker] = []
        self.transit: list[tuple[WorkerId, WatchEvent]] = []
        self.pages: list[tuple[WorkerId, SnapshotJob, BlockPage]] = []
        self.filling: list[Iterator[None]] = []
        self.predictions: list[Prediction | None] = []
        self.num_epochs = 0
        for name in WORKERS:
            self._begin(name)

    def _begin(self, name: str) -> None:
        self.num_epochs += 1
        worker = self.workers[name] = ToldWorker(name, self.num_epochs, self.loop)
        self.index.join(worker.worker_id, worker.epoch)

    def _collect(self) -> None:
        for worker in self.workers.values():
            self.transit += [(worker.worker_id, event) for event in worker.take()]

    # ------------------------------------------------------------ workers

    @rule(name=workers, block_hash=names, tier=tiers)
    def store(self, name: str, block_hash: BlockHash, tier: BlockTier) -> None:
        self.workers[name].tell(stored(block_hash, tier))
        self._collect()

    @rule(name=workers, changes=st.lists(st.tuples(names, st.booleans()), min_size=1, max_size=6))
    def change_together(self, name: str, changes: list[tuple[BlockHash, bool]]) -> None:
        self.workers[name].tell(*((stored if is_stored else removed)(each) for each, is_stored in changes))
        self._collect()

    @rule(name=workers, block_hash=names)
    def remove(self, name: str, block_hash: BlockHash) -> None:
        self.workers[name].tell(removed(block_hash))
        self._collect()

    @rule(name=workers)
    def clear(self, name: str) -> None:
        self.workers[name].tell(CLEARED)
        self._collect()

    @rule(name=workers)
    def report(self, name: str) -> None:
        self.workers[name].report()
        self._collect()

    @rule(name=workers)
    def restart(self, name: str) -> None:
        self._collect()
        self.former.append(self.workers[name])
        self._begin(name)

    @rule(name=workers)
    def cut_the_stream(self, name: str) -> None:
        worker = self.workers[name]
        self.index.cut(worker.worker_id)
        self._collect()
        self.index.join(worker.worker_id, worker.epoch)
        self.transit += [(worker.worker_id, event) for event in worker.watch()]

    @rule(name=workers)
    def change_roles(self, name: str) -> None:
        worker = self.workers[name]
        self._collect()
        worker.number_anew()
        self.index.join(worker.worker_id, worker.epoch)
        self.transit += [(worker.worker_id, event) for event in worker.watch()]

    # ------------------------------------------------------------ the way

    @precondition(lambda self: self.transit)
    @rule(pick=picks)
    def deliver_any(self, pick: int) -> None:
        self.index.apply(*self.transit.pop(pick % len(self.transit)))

    @precondition(lambda self: self.transit)
    @rule()
    def deliver_all(self) -> None:
        for worker_id, event in self.transit:
            self.index.apply(worker_id, event)
        self.transit.clear()

    @precondition(lambda self: self.transit)
    @rule(pick=picks)
    def deliver_twice(self, pick: int) -> None:
        self.index.apply(*self.transit[pick % len(self.transit)])

    @precondition(lambda self: self.transit)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.transit.pop(pick % len(self.transit))

    # ------------------------------------------------------------ repairs

    @rule(name=workers)
    def ask(self, name: str) -> None:
        worker = self.workers[name]
        job = self.index.ask(worker.worker_id)
        if job is not None:
            self.pages.append((worker.worker_id, job, worker.page(job)))

    @precondition(lambda self: self.pages)
    @rule(pick=picks)
    def begin_to_fill(self, pick: int) -> None:
        self.filling.append(self.index.fill(*self.pages.pop(pick % len(self.pages))))

    @precondition(lambda self: self.filling)
    @rule(pick=picks)
    def fill_a_piece(self, pick: int) -> None:
        filling = self.filling[pick % len(self.filling)]
        if next(filling, filling) is filling:
            self.filling.remove(filling)

    @rule(name=workers)
    def give_the_repair_up(self, name: str) -> None:
        self.index.abandon(self.workers[name].worker_id)

    @rule(name=workers)
    def repair_at_once(self, name: str) -> None:
        repair(self.index, self.workers[name])

    # ------------------------------------------------------------ the router

    @rule(name=workers, hashes=st.lists(names, max_size=4, unique=True), seconds=st.floats(0, 20))
    def predict(self, name: str, hashes: list[BlockHash], seconds: float) -> None:
        until = self.clock.now() + seconds
        self.predictions.append(self.index.predict(self.workers[name].worker_id, hashes, until))

    @precondition(lambda self: self.predictions)
    @rule(pick=picks)
    def withdraw(self, pick: int) -> None:
        self.index.withdraw(self.predictions[pick % len(self.predictions)])

    @rule()
    def clear_some(self) -> None:
        self.index.clear_some()

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def asking_never_fails(self) -> None:
        for found in (self.index.overlaps(NAMES[:6]), self.index.overlaps(NAMES[6:])):
            for overlap in found.values():
                assert 0 <= overlap.num_certain <= overlap.num_blocks <= len(NAMES)
        for worker in self.workers.values():
            assert 0.0 <= self.index.confidence(worker.worker_id) <= 1.0

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        try:
            self._quiesce()
        finally:
            for worker in (*self.workers.values(), *self.former):
                worker.end()
            self.loop.close()

    def _quiesce(self) -> None:
        """No more changes, streams in order again, then a few reports: a router gets one a second."""
        for filling in self.filling:
            for _ in filling:
                pass
        self.clock.advance(60.0)
        for _ in range(5):
            for worker in self.workers.values():
                worker.report()
                deliver(self.index, worker)
                repair(self.index, worker)
        while self.index.clear_some():
            pass
        for worker in self.workers.values():
            assert view_of(self.index, worker, NAMES) == set(worker.held)
            assert self.index.num_blocks(worker.worker_id) == len(worker.held)
            assert self.index.confidence(worker.worker_id) == 1.0
        held = {name for worker in self.workers.values() for name in worker.held}
        assert len(self.index._holders) == len(held)
        assert self.index.num_predictions == 0


TestIndexUnderFire = IndexUnderFire.TestCase
TestIndexUnderFire.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, phases=PHASES)
