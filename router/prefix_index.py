"""PrefixIndex: which worker holds which cached block, by hash.

Owns the view that each worker's Watch stream feeds: a snapshot, then numbered changes, checked by digests.
Knows no streams and no load; a sequence of changes that does not fit raises OutOfStep, and whoever feeds it
watches anew. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.block_hash import BlockHash
from core.ids import WorkerId
from core.jobs import WatchEvent
from core.worker_status import BlockEvent, BlockEventKind


class OutOfStep(Exception):
    """The view of a worker no longer fits what it says; a new snapshot is needed."""


@dataclass(slots=True)
class _View:
    """What one worker is known to hold, and the number of the last change included."""

    number: int
    hashes: set[BlockHash] = field(default_factory=set)
    digest: int = 0


class PrefixIndex:
    """Hash → workers, and per worker the set it holds."""

    def __init__(self) -> None:
        self._views: dict[WorkerId, _View] = {}
        self._holders: dict[BlockHash, set[WorkerId]] = {}

    def num_blocks(self, worker_id: WorkerId) -> int:
        """Blocks that the worker is known to hold."""
        view = self._views.get(worker_id)
        return 0 if view is None else len(view.hashes)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop the view of a worker that is gone, or about to send a new snapshot."""
        view = self._views.pop(worker_id, None)
        for block_hash in view.hashes if view is not None else ():
            self._discard_holder(block_hash, worker_id)

    def apply(self, worker_id: WorkerId, event: WatchEvent) -> None:
        """Take in one message of the worker's Watch stream. Raises OutOfStep on a gap or a wrong digest."""
        if event.snapshot is not None:
            self.forget(worker_id)
            view = self._views[worker_id] = _View(event.number)
            for block_hash in event.snapshot.hashes:
                self._store(view, worker_id, block_hash)
        elif event.events:
            view = self._view(worker_id)
            if view.number + len(event.events) != event.number:
                raise OutOfStep(f"changes up to {event.number} do not follow {view.number}")
            for change in event.events:
                self._change(view, worker_id, change)
            view.number = event.number
        if event.digest is not None:
            self._check(self._view(worker_id), event)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Worker → how many of `hashes`, from the first on, it holds without a hole; workers with none
        are absent.
        """
        lengths: dict[WorkerId, int] = {}
        alive: set[WorkerId] | None = None
        for length, block_hash in enumerate(hashes, start=1):
            holders = self._holders.get(block_hash)
            if not holders:
                break
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            lengths.update(dict.fromkeys(alive, length))
        return lengths

    def _view(self, worker_id: WorkerId) -> _View:
        view = self._views.get(worker_id)
        if view is None:
            raise OutOfStep("a change came before the snapshot")
        return view

    def _check(self, view: _View, event: WatchEvent) -> None:
        if event.number != view.number:
            raise OutOfStep(f"the worker is at change {event.number}, its view at {view.number}")
        if event.digest != (len(view.hashes), view.digest):
            raise OutOfStep("the digest of the worker's blocks differs from the view's")

    def _change(self, view: _View, worker_id: WorkerId, change: BlockEvent) -> None:
        if change.kind is BlockEventKind.CLEARED:
            for block_hash in list(view.hashes):
                self._remove(view, worker_id, block_hash)
            return
        assert change.block_hash is not None
        if change.kind is BlockEventKind.STORED:
            self._store(view, worker_id, change.block_hash)
        else:
            self._remove(view, worker_id, change.block_hash)

    def _store(self, view: _View, worker_id: WorkerId, block_hash: BlockHash) -> None:
        if block_hash not in view.hashes:
            view.hashes.add(block_hash)
            view.digest ^= digest_part(block_hash)
            self._holders.setdefault(block_hash, set()).add(worker_id)

    def _remove(self, view: _View, worker_id: WorkerId, block_hash: BlockHash) -> None:
        if block_hash in view.hashes:
            view.hashes.remove(block_hash)
            view.digest ^= digest_part(block_hash)
            self._discard_holder(block_hash, worker_id)

    def _discard_holder(self, block_hash: BlockHash, worker_id: WorkerId) -> None:
        holders = self._holders.get(block_hash)
        if holders is not None:
            holders.discard(worker_id)
            if not holders:
                del self._holders[block_hash]


def digest_part(block_hash: BlockHash) -> int:
    """What a block adds to the digest: its hash's first eight bytes, little-endian."""
    return int.from_bytes(block_hash[:8], "little")
