"""BlockView: the set of blocks of one worker, as its events and pages tell it.

Owns the number of the last event that counts, the digests, and whether the view is to be trusted. The blocks
themselves are in `holders`, under the view's bit. Order and loss are judged by numbers alone: what comes
twice or too late changes nothing, what is missing starts a repair, during which the old view stays. Lives on
the event loop.

A page may be ahead of the events, or behind them. Ahead, the events up to its number are skipped for its
parts when they come. Behind, the later events are applied to it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from core.block_hash import NUM_PARTS, BlockHash, digest_part, part_of
from core.clock import Clock
from core.ids import Epoch, WorkerId
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, BlockTier
from router.holders import Holders
from router.predictions import Predictions
from router.repair_pass import RepairPass

_STALE_TRUST = 0.5
_HALF_LIFE_S = 10.0
_PIECE = 512
_MANY_LATE = 3


class Doubt(StrEnum):
    """Why a view is not trusted: nothing was heard yet, events are missing, the set differs."""

    JOINED = "joined"
    GAP = "gap"
    DIGEST = "digest"


@dataclass(slots=True)
class Tally:
    """What all views of an index, past ones too, have counted together."""

    num_repairs: dict[Doubt, int] = field(default_factory=lambda: dict.fromkeys(Doubt, 0))
    num_mismatches: int = 0
    num_ignored: int = 0


class BlockView:
    """Holds nothing at first, and is in doubt until the worker's digest says that this is so.

    `max_blocks`: more than this are not taken in, whatever the worker says.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        max_blocks: int,
        holders: Holders,
        predictions: Predictions,
        clock: Clock,
        tally: Tally,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.bit = holders.take_bit()
        self.num_blocks = 0
        self.lower: dict[BlockHash, BlockTier] = {}
        """The blocks that are not on the device."""
        self.doubt: Doubt | None = Doubt.JOINED
        self.lag_s = 0.0
        """How long the last events had waited at the worker."""
        self.drift = 0
        """By how many blocks the worker's count and ours differed when the digest last did not fit."""
        self._max_blocks = max_blocks
        self._holders = holders
        self._predictions = predictions
        self._clock = clock
        self._tally = tally
        self._doubted_at = clock.now()
        self._num_missed = 0
        self._number = 0
        self._xor = 0
        self._digests = array("Q", bytes(8 * NUM_PARTS))
        self._is_joining = True
        self._num_late = 0  # digests or pages in a row that were of before the last event
        self._covered = 0  # each event up to here is in the view, whether it came or not
        self._settled = 0  # parts may be ahead of the events up to here
        self._ahead: array[int] | None = None  # part → number up to which events are in it already
        self._pass: RepairPass | None = None

    # ------------------------------------------------------------ trust

    @property
    def confidence(self) -> float:
        """1 while the view is what the worker says; else what a stale one is worth, or as much of it as a
        repair has put right.

        Where it is known how many events are missing, each can have made one block wrong, and those since
        then were heard. Otherwise anything may have happened, and more by the second.
        """
        if self.doubt is None:
            return 1.0
        stale = self._known_share() if self.doubt is Doubt.GAP else self._faded()
        return stale if self._pass is None else max(stale, self._pass.progress)

    def _known_share(self) -> float:
        return self.num_blocks / (self.num_blocks + self._num_missed) if self.num_blocks else 0.0

    def _faded(self) -> float:
        age_s = self._clock.now() - self._doubted_at
        faded: float = _STALE_TRUST * 0.5 ** (age_s / _HALF_LIFE_S)
        return faded

    def join(self) -> None:
        """The stream has ended, or begins anew; its first digest will say whether the view still holds."""
        self._is_joining = True
        if self.doubt is Doubt.GAP:
            self.doubt = None  # how much is missing is not known any more
        self._begin_doubt(Doubt.JOINED)

    def _begin_doubt(self, doubt: Doubt) -> None:
        if self.doubt is None:
            self._doubted_at = self._clock.now()
            self._num_missed = 0
            self.doubt = doubt

    # ------------------------------------------------------------ events

    def take_events(self, event: WatchEvent) -> None:
        """Apply what is new of the events."""
        self.lag_s = event.age_s
        if event.number <= self._number:
            self._tally.num_ignored += len(event.events)
            return
        first = event.number - len(event.events) + 1
        if first > self._number + 1:
            self._miss(first - 1)
        skipped = max(0, self._number + 1 - first)
        self._tally.num_ignored += skipped
        for number, change in enumerate(event.events[skipped:], first + skipped):
            self._change(number, change)
        self._number, self._num_late = event.number, 0
        self._settle()

    def check(self, number: int, digest: tuple[int, int]) -> None:
        """Compare the view with the digest of the worker's set after event `number`."""
        if number < self._number:
            # late, newer events have come; or the worker's numbers have begun again
            self._num_late += 1
            if not self._is_joining and self._num_late < _MANY_LATE:
                return
            self._count_anew(number)
        self._num_late, self._is_joining = 0, False
        if number > self._number:
            self._miss(number)
            self._number = number
            self._settle()
        if self._pass is not None or self._number < self._settled:
            return
        if digest == (self.num_blocks, self._xor):
            self.doubt = None
            return
        if self.doubt is None:
            self.drift = abs(digest[0] - self.num_blocks)
            self._tally.num_mismatches += 1
        self._begin_doubt(Doubt.DIGEST)

    def _miss(self, number: int) -> None:
        """The events up to `number` will not come."""
        if number <= self._covered:
            return
        if self._pass is not None:
            self._pass.miss(number)
        self._begin_doubt(Doubt.GAP)
        self._num_missed += number - self._number

    def _count_anew(self, number: int) -> None:
        """The worker's numbers begin again: what was known by number is void."""
        self._number, self._covered, self._settled = number, 0, 0
        self._ahead = self._pass = None

    def _settle(self) -> None:
        if self._number >= self._settled:
            self._ahead = None

    def _change(self, number: int, change: BlockEvent) -> None:
        if self._pass is not None:
            self._pass.note(number, change)
        if change.kind is BlockEventKind.CLEARED:
            self._clear(number)
            return
        assert change.block_hash is not None
        part = part_of(change.block_hash)
        if self._ahead is None or number > self._ahead[part]:
            self._apply(part, change)

    def _clear(self, number: int) -> None:
        """Empty the view at once, by a new bit: the old one is cleared from the blocks in the background."""
        if self._ahead is not None and max(self._ahead) >= number:
            # some parts hold what came after; they are fetched again
            self._covered, self._settled = 0, 0
            self._ahead = None
            if self._pass is not None:
                self._pass.restart()
            self._begin_doubt(Doubt.GAP)
        self._predictions.drop(self.bit)
        self._holders.give_up(self.bit)
        self.bit = self._holders.take_bit()
        self.num_blocks, self._xor = 0, 0
        self.lower.clear()
        self._digests = array("Q", bytes(8 * NUM_PARTS))

    # ------------------------------------------------------------ repair

    def ask(self) -> SnapshotJob | None:
        """The next page that the view needs; None if it is right, or cannot be repaired yet."""
        if self.doubt is None or self._is_joining:
            return None
        if self._pass is None:
            self._pass = RepairPass(self._number)
            self._tally.num_repairs[self.doubt] += 1
        return self._pass.ask(self._digests.tolist() if self.num_blocks else [])

    def fill(self, job: SnapshotJob, page: BlockPage) -> Iterator[None]:
        """Take a page in, in pieces of well under a millisecond. Stops where the view is no longer what was
        asked for.
        """
        repair = self._pass
        if repair is None or repair.job is not job or page.epoch != self.epoch:
            return
        if not repair.arrived(page.number):
            self._num_late += 1
            if self._num_late >= _MANY_LATE:
                # what we ask for now cannot be older than what we have: its numbers have begun again
                self._count_anew(page.number)
            return
        self._num_late = 0
        num_restarts, num_seen = repair.num_restarts, 0
        changed: dict[int, dict[BlockHash, BlockTier]] = {part: {} for part in page.changed}
        for position, block_hash in enumerate(page.hashes):
            tier = page.tiers[position] if page.tiers else BlockTier.DEVICE
            changed[part_of(block_hash)][block_hash] = tier
        for part in range(page.first_part, page.end_part):
            if num_seen >= _PIECE:
                num_seen = 0
                yield
                if self._pass is not repair or repair.num_restarts != num_restarts:
                    return
            blocks = changed.get(part)
            if blocks is not None:
                num_seen += self._replace(part, blocks)
                self._replay(part, repair, page.number)
                repair.done(part)
            elif self._is_as_asked(part, job):
                repair.done(part)
            else:
                repair.retry(part)
                num_seen += 1
                continue
            num_seen += 1
            if page.number > self._number:
                self._mark_ahead(part, page.number)
        if repair.is_done:
            self._finish(repair)

    def abandon(self) -> None:
        """The worker did not answer: the pass ends here, the doubt stays."""
        self._pass = None

    def _is_as_asked(self, part: int, job: SnapshotJob) -> bool:
        position = part - job.first_part
        return position < len(job.known) and self._digests[part] == job.known[position]

    def _mark_ahead(self, part: int, number: int) -> None:
        if self._ahead is None:
            self._ahead = array("Q", bytes(8 * NUM_PARTS))
        self._ahead[part] = number
        self._settled = max(self._settled, number)

    def _finish(self, repair: RepairPass) -> None:
        self._pass = None
        self._covered = repair.covered
        if not self._is_joining:
            self.doubt = None

    def _replace(self, part: int, blocks: dict[BlockHash, BlockTier]) -> int:
        """Make a part hold exactly `blocks`; how many blocks were looked at."""
        num_seen = len(blocks)
        if self._digests[part]:
            num_seen += len(self._holders.parts[part])
            for block_hash in self._holders.blocks_of(part, self.bit):
                if block_hash not in blocks:
                    self._remove(part, block_hash)
        for block_hash, tier in blocks.items():
            self._store(part, block_hash, tier)
        return num_seen

    def _replay(self, part: int, repair: RepairPass, number: int) -> None:
        if number >= self._number:
            return
        for _, change in repair.later(number):
            if change.kind is BlockEventKind.CLEARED:
                self._replace(part, {})
            elif change.block_hash is not None and part_of(change.block_hash) == part:
                self._apply(part, change)

    # ------------------------------------------------------------ blocks

    def close(self) -> None:
        """The worker is gone. What it held is cleared away in the background."""
        self._predictions.drop(self.bit)
        self._holders.give_up(self.bit)

    def holds(self, block_hash: BlockHash) -> bool:
        return self._holders.has(part_of(block_hash), block_hash, self.bit)

    def _apply(self, part: int, change: BlockEvent) -> None:
        assert change.block_hash is not None
        if change.kind is BlockEventKind.STORED:
            self._store(part, change.block_hash, change.tier)
        else:
            self._remove(part, change.block_hash)

    def _store(self, part: int, block_hash: BlockHash, tier: BlockTier) -> None:
        if self._holders.has(part, block_hash, self.bit):
            old = self.lower.get(block_hash, BlockTier.DEVICE)
            if old is tier:
                return
            self._toggle(part, digest_part(block_hash, old))
        else:
            if self.num_blocks >= self._max_blocks:
                return
            self.num_blocks += 1
            self._holders.add(part, block_hash, self.bit)
            self._predictions.fulfil(self.bit, block_hash)
        self._toggle(part, digest_part(block_hash, tier))
        if tier:
            self.lower[block_hash] = tier
        elif self.lower:
            self.lower.pop(block_hash, None)

    def _remove(self, part: int, block_hash: BlockHash) -> None:
        if self._holders.has(part, block_hash, self.bit):
            self.num_blocks -= 1
            self._holders.discard(part, block_hash, self.bit)
            self._toggle(part, digest_part(block_hash, self.lower.pop(block_hash, BlockTier.DEVICE)))

    def _toggle(self, part: int, digest: int) -> None:
        self._digests[part] ^= digest
        self._xor ^= digest
