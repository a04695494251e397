"""Line: the requests that wait for their turn, and how many run at once.

Owns the order (see `fair_queue`), the bound of the line, how long a newcomer would wait, and who gives way
when it is full. No more run than the decode workers have places for and an eighth more that read their
prompts meanwhile: whoever waits does so here, where order and priority are kept, and not in a worker. Lives
on the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from core.clock import Clock, Deadline
from core.errors import DeadlineExceeded, Overloaded
from core.running_line import RunningLine
from router.bookings import Bookings
from router.fair_queue import Entry, FairQueue
from router.promises import PLACE, Promises
from router.running_limit import RunningLimit
from router.tenants import Tenant
from router.tenants_config import MAX_PRIORITY

_LOOK_AGAIN_S = 0.25
_SERVICE_STEP = 0.1
# of a request's tokens: with so many, what each costs is thought to be as much as what all cost alike
_TYPICAL_COST = 512.0
_LARGEST_DECAY = 0.99
# a worker's clock may end a request so much sooner
_OVER_S = 0.1
_PLACE = "place"


@dataclass(eq=False, slots=True)
class _Turn:
    """One that waits to be called, or runs. `cost`: see `Line.place`; `given_s`: its time when it came;
    `has_waited`: no place was free then.
    """

    called: asyncio.Future[None]
    cost: float
    deadline: Deadline
    given_s: float
    has_waited: bool = False


class Line:
    """`capacity` says how many may run at present; `observe` is told (waiting, running) at each change.
    `promises`: with the other routers, of places for calls that were refused before.
    """

    def __init__(
        self,
        max_queue: int,
        aging_s: float,
        clock: Clock,
        capacity: Callable[[], int],
        observe: Callable[[int, int], None],
        promises: Promises,
    ) -> None:
        self._max_queue = max_queue
        self._clock = clock
        self._capacity = capacity
        self._observe = observe
        self._queue: FairQueue[_Turn] = FairQueue(MAX_PRIORITY, aging_s)
        self._num_running = 0
        self._num_held = 0
        self._mean_held_s = 0.0
        self._service = RunningLine(_TYPICAL_COST, decay=1.0 - _SERVICE_STEP)
        self._spread = 0.0
        self._limit = RunningLimit()
        self._largest_cost = 0.0
        self._bookings: Bookings[str] = Bookings()
        self._last_due_at = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._promises = promises
        promises.watch(PLACE, self)

    @property
    def num_places(self) -> int:
        """How many may run at once, which is less than the workers have places where that many would be too
        slow.
        """
        return int(min(self._capacity(), self._limit.num))

    def predicted_wait_s(self, priority: int, num: int = 1) -> float:
        """Until the last of `num` newcomers of that priority would run; 0 where nothing was measured yet."""
        num_free = self.num_places - self._num_running if len(self._queue) == 0 else 0
        num_turns = self._queue.num_ahead(priority) + num - max(0, num_free)
        return max(0, num_turns) * self._seconds_per_place(num)

    def check(self, costs: Sequence[float], priority: int, call: int, deadline: Deadline) -> None:
        """Raises Overloaded for newcomers of `costs` that have no room in the line, even if others of a lower
        priority gave way, or that would not be served in time. `call`: the same for the same call sent again.
        """
        now, num_places = self._clock.now(), self.num_places
        wait_s = self.predicted_wait_s(priority, len(costs))
        # more than ever run and wait at once: let in when all of that is free, else it would never be
        num = min(len(costs), max(1, num_places + self._max_queue))
        # where nobody runs the call shows by itself what it takes
        whole_s = wait_s + self._service_s(max(costs))
        if self._num_running and wait_s > 0 and whole_s > deadline.left_s(self._clock):
            message = f"with its wait it would take about {whole_s:.1f} s, longer than its deadline allows"
            raise self._refusal(message, num, call, now, reason="deadline")
        is_due = self._bookings.is_due(call, now)
        kept = [] if is_due else self._bookings.kept(_PLACE, now)
        num_kept = math.floor(sum(amount for due_at, amount in kept if due_at <= now))
        room = num_places + self._max_queue - self._num_running - len(self._queue) - num_kept
        if room < num and not is_due and self._promises.try_claim(PLACE, call):
            return  # another router keeps a place for it, and gives that one to somebody else
        if num - room > self._queue.num_below(priority):
            raise self._refusal("too many requests are waiting", num, call, now, reason="queue_full")
        while room < num:
            lowest = self._queue.last_below(priority)
            assert lowest is not None
            self._queue.remove(lowest)
            if not lowest.item.called.done():
                lowest.item.called.set_exception(
                    self._refusal("a request of higher priority took the place", 1, 0, now, reason="shed")
                )
            room += 1
        if is_due:
            self._bookings.claim(call)

    def due_by(self, at: float) -> Iterator[tuple[int, float]]:
        """Refused calls that are to come by then, and when."""
        return self._bookings.due_by(at)

    def hand_over(self, call: int, now: float) -> None:
        """A call that was refused here came to another router: its place is free."""
        if self._bookings.is_due(call, now):
            self._bookings.claim(call)

    @asynccontextmanager
    async def place(
        self, tenant: Tenant, priority: int, cost: float, deadline: Deadline
    ) -> AsyncIterator[None]:
        """A place among those that run. Raises DeadlineExceeded, or Overloaded if it had to give way.

        `cost` in any unit that is the same for all, here tokens.
        """
        turn = _Turn(asyncio.get_running_loop().create_future(), cost, deadline, deadline.left_s(self._clock))
        now = self._clock.now()
        entry = self._queue.push(turn, tenant.tenant_id, tenant.limits.weight, cost, priority, now)
        self._call_next()
        turn.has_waited = True
        try:
            async with asyncio.timeout(deadline.left_s(self._clock)):
                await turn.called
        except BaseException as error:
            self._withdraw(entry)
            if isinstance(error, TimeoutError):
                message = "the deadline passed while the request waited for its turn"
                raise DeadlineExceeded(message) from None
            raise
        started_at = self._clock.now()
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            self._note_end(turn, self._clock.now() - started_at, is_whole)
            self._num_running -= 1
            self._measure(self._clock.now() - started_at, cost, is_whole)
            self._call_next()

    def _withdraw(self, entry: Entry[_Turn]) -> None:
        """Its client has gone, its deadline has passed, or it gave way; perhaps just when its turn came."""
        called = entry.item.called
        if called.done() and not called.cancelled() and called.exception() is None:
            self._num_running -= 1
        self._queue.remove(entry)
        self._call_next()

    def _call_next(self) -> None:
        now = self._clock.now()
        while self._num_running < self.num_places and (entry := self._queue.pop(now)) is not None:
            if entry.item.called.done():
                continue
            if self._is_too_late(entry.item):
                self._give_up(entry.item, now)
                continue
            entry.item.called.set_result(None)
            self._num_running += 1
        if len(self._queue) and (self._ticker is None or self._ticker.done()):
            self._ticker = asyncio.create_task(self._look_again(), name="line")
        self._observe(len(self._queue), self._num_running)

    async def _look_again(self) -> None:
        """Workers come and go: see whether there is more room, as long as anybody waits. Whoever cannot be
        answered in time any more hears of it now, not at its deadline.
        """
        while len(self._queue):
            await asyncio.sleep(_LOOK_AGAIN_S)
            self._shed_the_late()
            self._call_next()

    def _shed_the_late(self) -> None:
        now = self._clock.now()
        for entry in self._queue.waiting():
            if not entry.item.called.done() and self._is_too_late(entry.item):
                self._queue.remove(entry)
                self._give_up(entry.item, now)

    def _is_too_late(self, turn: _Turn) -> bool:
        """Whether others would make better use of the place. One that finds a place free takes nothing from
        anybody: it runs, and shows what a request takes by now.
        """
        return turn.has_waited and self._service_s(turn.cost) > turn.deadline.left_s(self._clock)

    def _give_up(self, turn: _Turn, now: float) -> None:
        message = "the request waited until there was no time left to answer it"
        turn.called.set_exception(self._refusal(message, 1, 0, now, reason="deadline"))

    def _note_end(self, turn: _Turn, held_s: float, is_whole: bool) -> None:
        now, mean_s = self._clock.now(), self._service.at(turn.cost)
        if is_whole:
            self._limit.answered(held_s, turn.given_s, mean_s, self._num_running, now)
        elif turn.deadline.left_s(self._clock) < _OVER_S:
            self._limit.cut_off(held_s, turn.given_s, mean_s, self._num_running, now)

    def _seconds_per_place(self, num_more: int = 0) -> float:
        """How often a place becomes free, with `num_more` that take those that are free now."""
        num_running = max(self._num_running, min(self.num_places, self._num_running + num_more))
        return self._mean_held_s / max(1, num_running)

    def _service_s(self, cost: float) -> float:
        """How long a request takes once its turn has come, as most do: what those before took that cost as
        much, and twice their spread around that. What costs more than any of late is thought to take no
        longer than that one: a wrong refusal costs an answer, a late one only its work.
        """
        return self._service.at(min(cost, self._largest_cost)) * (1.0 + 2.0 * self._spread)

    def _measure(self, held_s: float, cost: float, is_whole: bool) -> None:
        """A place was held for so long. An answer that was cut short would have taken longer than that, by
        how much nobody knows.
        """
        # the first one, which may have waited for a worker to start, weighs no more than those after it
        self._num_held += 1
        self._mean_held_s += max(_SERVICE_STEP, 1.0 / self._num_held) * (held_s - self._mean_held_s)
        expected_s = self._service.at(cost)
        if not is_whole and held_s <= expected_s:
            return
        if self._service.num_observed:
            error = min(1.0, abs(held_s - expected_s) / max(expected_s, 1e-9))
            self._spread += _SERVICE_STEP * (error - self._spread)
        self._largest_cost = max(cost, self._largest_cost * _LARGEST_DECAY)
        self._service.observe(cost, held_s)

    def _refusal(self, message: str, num: int, call: int, now: float, reason: str) -> Overloaded:
        """One after the other, as places will become free. `call` 0: it will not be known when it comes
        back, so nothing is kept for it.
        """
        if call and self._bookings.is_due(call, now):
            self._bookings.postpone(call)
        num_coming = num * self._bookings.share
        due_at = max(self._last_due_at, now) + num_coming * max(0.001, self._seconds_per_place())
        retry_after_s = max(1, math.ceil(due_at - now))
        size = max(1, self._max_queue)
        if call and self._bookings.book(call, {_PLACE: num}, now + retry_after_s, {_PLACE: size}):
            self._last_due_at = due_at
        return Overloaded(message, retry_after_s=retry_after_s, reason=reason)
