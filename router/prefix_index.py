"""PrefixIndex: which worker holds which cached block, by hash.

Owns the views of all workers, what they are expected to hold, and the answer to "who holds most of this
prompt". Fed by each worker's Watch; knows no streams: `ask` and `fill` say what to fetch and take it in.
Nothing that a worker sends makes it raise. Lives on the event loop, inside each router.

A hash stands for its block and all before it, so a block whose parent is not known yet needs no list to wait
in: the walk does not reach it until the parent has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from core.block_hash import BlockHash
from core.clock import Clock, MonotonicClock
from core.ids import Epoch, WorkerId
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from router.block_view import BlockView, Tally
from router.holders import Holders, walk
from router.predictions import Prediction, Predictions

_MAX_BLOCKS = 1 << 24
_CLEAR_PIECE = 2048


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a worker holds of a prompt. `num_blocks`: from the first on without a hole, expected ones
    included; `num_certain`: those that it has told; `num_lower`: how many of them are not
    on the device. `confidence`: how far the worker's view is to be trusted, 0 to 1.
    """

    num_blocks: int
    num_certain: int
    num_lower: int
    confidence: float


class PrefixIndex:
    """Hash → workers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.tally = Tally()
        self._clock = clock or MonotonicClock()
        self._holders = Holders()
        self._predictions = Predictions()
        self._views: dict[WorkerId, BlockView] = {}

    # ------------------------------------------------------------ reading

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Worker → how many of `hashes`, from the first on, it holds or will hold, without a hole; workers
        with none are absent.
        """
        lengths = self.told(hashes)
        for worker_id, expected in self.expected(hashes).items():
            lengths[worker_id] = max(expected, lengths.get(worker_id, 0))
        return lengths

    def told(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """`match` of what workers have told that they hold."""
        return self._by_worker(walk(self._holders, hashes))

    def expected(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """`match` of what requests that were sent to workers will leave there, or have left just now."""
        self._predictions.expire(self._clock.now())
        return self._by_worker(self._predictions.lengths(hashes))

    def overlaps(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, Overlap]:
        """`match` in detail."""
        found = self.match(hashes)
        certain = self.told(hashes)
        return {
            worker_id: Overlap(
                num_blocks=length,
                num_certain=certain.get(worker_id, 0),
                num_lower=_num_lower(self._views[worker_id], hashes, length),
                confidence=self._views[worker_id].confidence,
            )
            for worker_id, length in found.items()
        }

    def confidence(self, worker_id: WorkerId) -> float:
        """How far the worker's view is to be trusted: 1 if it is what the worker last said, 0 if there is
        none, between them while it is stale or being repaired.
        """
        view = self._views.get(worker_id)
        return 0.0 if view is None else view.confidence

    def num_blocks(self, worker_id: WorkerId) -> int:
        """Blocks that the worker is known to hold."""
        view = self._views.get(worker_id)
        return 0 if view is None else view.num_blocks

    def views(self) -> tuple[BlockView, ...]:
        """All views, for whoever counts."""
        return tuple(self._views.values())

    @property
    def num_predictions(self) -> int:
        return len(self._predictions)

    # ------------------------------------------------------------ feeding

    def join(self, worker_id: WorkerId, epoch: Epoch, max_blocks: int = _MAX_BLOCKS) -> None:
        """A Watch stream of this incarnation begins. Its view is kept, if there is one; one of another
        incarnation is dropped. More than `max_blocks` blocks are not taken in.
        """
        view = self._views.get(worker_id)
        if view is not None and view.epoch == epoch:
            view.join()
            return
        self.forget(worker_id)
        self._views[worker_id] = BlockView(
            worker_id, epoch, max_blocks, self._holders, self._predictions, self._clock, self.tally
        )

    def cut(self, worker_id: WorkerId) -> None:
        """The worker's Watch has ended. Its view stays, and is trusted less by the second."""
        view = self._views.get(worker_id)
        if view is not None:
            view.join()

    def forget(self, worker_id: WorkerId) -> None:
        """Drop the view of a worker that is gone. Takes no time, whatever its size."""
        view = self._views.pop(worker_id, None)
        if view is not None:
            view.close()

    def apply(self, worker_id: WorkerId, event: WatchEvent) -> None:
        """Take in one message of the worker's Watch stream. One of an incarnation that is not known, or is
        known no more, changes nothing.
        """
        view = self._views.get(worker_id)
        if view is None or view.epoch != event.epoch:
            self.tally.num_ignored += len(event.events)
            return
        if event.events:
            view.take_events(event)
        if event.digest is not None:
            view.check(event.number, event.digest)

    def ask(self, worker_id: WorkerId) -> SnapshotJob | None:
        """The next page that the worker's view needs; None if it is right."""
        view = self._views.get(worker_id)
        return None if view is None else view.ask()

    def fill(self, worker_id: WorkerId, job: SnapshotJob, page: BlockPage) -> Iterator[None]:
        """Take in the answer to `job`, in pieces: whoever iterates lets others run between them."""
        view = self._views.get(worker_id)
        if view is not None:
            yield from view.fill(job, page)

    def abandon(self, worker_id: WorkerId) -> None:
        """The worker did not answer; the next `ask` begins anew."""
        view = self._views.get(worker_id)
        if view is not None:
            view.abandon()

    def clear_some(self) -> bool:
        """Go on with clearing away what workers that are gone held; whether there is more."""
        return self._holders.clear(_CLEAR_PIECE)

    # ------------------------------------------------------------ predicting

    def predict(self, worker_id: WorkerId, hashes: Sequence[BlockHash], until: float) -> Prediction | None:
        """Count the blocks `hashes` of a request, from its first on, as held by the worker it was sent to,
        until they are, or are taken back (`withdraw`), or until then. None if the worker has no view, or
        holds them all.
        """
        view = self._views.get(worker_id)
        if view is None or not hashes or view.holds(hashes[-1]):
            return None
        self._predictions.expire(self._clock.now())
        return self._predictions.add(view.bit, hashes, until)

    def end_by(self, prediction: Prediction | None, until: float) -> None:
        """The request has been read: what it made will be told by then."""
        if prediction is not None:
            self._predictions.end_by(prediction, until)

    def withdraw(self, prediction: Prediction | None) -> None:
        """The request failed, or went elsewhere."""
        if prediction is not None:
            self._predictions.withdraw(prediction)

    def _by_worker(self, lengths: dict[int, int]) -> dict[WorkerId, int]:
        return {
            worker_id: length
            for worker_id, view in self._views.items()
            if (length := lengths.get(view.bit)) is not None
        }


def _num_lower(view: BlockView, hashes: Sequence[BlockHash], length: int) -> int:
    if not view.lower:
        return 0
    return sum(1 for block_hash in islice(hashes, length) if block_hash in view.lower)
