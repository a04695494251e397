"""RepairPass: one pass over the parts of a worker's set, page by page, to put a view right again.

Owns how far it is, what must be asked again, and the events that came meanwhile: a page may be older than the
last of them. Knows no view. Pure; lives on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from core.block_hash import NUM_PARTS
from core.jobs import SnapshotJob
from core.worker_status import BlockEvent

_MAX_LOG = 65_536
_MAX_KNOWN = 1024
_NO_PAGE = -1


class RepairPass:
    """`number`: of the last event in the view when it begins."""

    def __init__(self, number: int) -> None:
        self.needed = 0
        """A page counts only if it holds this event: before it some were lost."""
        self.num_restarts = 0
        self.job: SnapshotJob | None = None
        """The page that was asked for last and has not come."""
        self._lowest = _NO_PAGE
        self._next_part = 0
        self._again: set[int] = set()
        self._log: deque[tuple[int, BlockEvent]] = deque()
        self._log_from = number

    @property
    def is_done(self) -> bool:
        return self._next_part == NUM_PARTS and not self._again

    @property
    def progress(self) -> float:
        """Share of the parts that are right again."""
        return (self._next_part - len(self._again)) / NUM_PARTS

    @property
    def covered(self) -> int:
        """All pages of this pass hold the events up to this one."""
        return self._lowest

    def ask(self, known: list[int]) -> SnapshotJob:
        """What to ask for next; `known`: digests of all parts of the view, empty if it holds nothing."""
        if self._next_part < NUM_PARTS:
            first = self._next_part
            end = min(NUM_PARTS, first + _MAX_KNOWN) if known else NUM_PARTS
            self.job = SnapshotJob(first, end, tuple(known[first:end]))
        else:
            # whole, whatever is known: so it cannot change on its way
            first = min(self._again)
            self.job = SnapshotJob(first, first + 1)
        return self.job

    def arrived(self, number: int) -> bool:
        """A page that holds the events up to `number` has come; whether what it says counts."""
        self.job = None
        while self._log and self._log[0][0] <= number:
            self._log.popleft()
        if number < self.needed or number < self._log_from:
            return False
        self._lowest = number if self._lowest == _NO_PAGE else min(self._lowest, number)
        return True

    def done(self, part: int) -> None:
        self._again.discard(part)
        self._next_part = max(self._next_part, part + 1)

    def retry(self, part: int) -> None:
        """The part must be asked for again."""
        self._again.add(part)
        self._next_part = max(self._next_part, part + 1)

    def miss(self, number: int) -> None:
        """Events up to `number` were lost: what was told without them counts no more."""
        if self._lowest != _NO_PAGE and self._lowest >= number:
            return
        self.needed = max(self.needed, number)
        self.restart()

    def restart(self) -> None:
        """Nothing of what was told counts."""
        self.num_restarts += 1
        self._lowest, self._next_part = _NO_PAGE, 0
        self._again.clear()

    def note(self, number: int, event: BlockEvent) -> None:
        """An event was applied to the view."""
        self._log.append((number, event))
        if len(self._log) > _MAX_LOG:
            self._log.clear()
            self._log_from = number
            self.miss(number)

    def later(self, number: int) -> Iterator[tuple[int, BlockEvent]]:
        """The noted events after `number`."""
        return ((noted, event) for noted, event in self._log if noted > number)
