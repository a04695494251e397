"""WorkerTable: which workers there are, whether they live, and how loaded they are.

Owns membership (polled announcements), one Watch task per worker, the reading of their silence, and the
prefix index they feed. A broken Watch means the worker is dead, at once, but what it holds is remembered for
as long as it is listed; silence makes it suspect. Without an answer from the membership source the last
table stands. Does not choose. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from core.clock import Clock
from core.errors import ServingError
from core.ids import Role, WorkerId, WorkerRef
from core.worker_status import Announcement
from router.config import RouterConfig
from router.prefix_index import PrefixIndex
from router.view_repairs import ViewRepairs
from router.worker_entry import WorkerEntry, WorkerState
from router.workers import Connect, MembershipSource

Sleep = Callable[[float], Awaitable[None]]

# after so many events from one worker, others get a turn
_MANY_EVENTS = 256

_log = logging.getLogger(__name__)


class WorkerTable:
    """The workers by id; one incarnation each. `start` before use, `stop` at the end."""

    def __init__(
        self,
        config: RouterConfig,
        source: MembershipSource,
        connect: Connect,
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.index = PrefixIndex(clock)
        self.repairs = ViewRepairs(self.index, clock, config.reconnect_s)
        self._config = config
        self._source = source
        self._connect = connect
        self._clock = clock
        self._sleep = sleep
        self._entries: dict[WorkerId, WorkerEntry] = {}
        self._departed: dict[Role, Announcement] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look for workers once, then keep looking in the background."""
        await self._poll()
        self._tasks = [
            asyncio.create_task(self._poll_forever(), name="membership"),
            asyncio.create_task(self._listen_for_silence(), name="silence"),
            asyncio.create_task(self._clear_the_index(), name="clearing"),
        ]

    async def stop(self) -> None:
        """End all tasks and let go of all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in list(self._entries.values()):
            self._drop(entry)
        await self.repairs.stop()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def entries(self) -> tuple[WorkerEntry, ...]:
        """All known workers, whatever their state."""
        return tuple(self._entries.values())

    def entry(self, ref: WorkerRef) -> WorkerEntry | None:
        """The incarnation that `ref` names, if it is still known."""
        entry = self._entries.get(ref.worker_id)
        return entry if entry is not None and entry.ref.epoch == ref.epoch else None

    def announcements(self) -> tuple[Announcement, ...]:
        """Of all known workers, and of the one that left last for a role that has none at present."""
        known = tuple(entry.announcement for entry in self._entries.values())
        roles = {announcement.ref.role for announcement in known}
        return known + tuple(item for role, item in self._departed.items() if role not in roles)

    def usable(self, role: Role) -> list[WorkerEntry]:
        """Workers of `role` that live and take work."""
        return [entry for entry in self._entries.values() if entry.ref.role is role and entry.is_usable]

    async def refresh(self) -> None:
        """Look for workers now."""
        await self._poll()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a worker comes, goes or changes its state, or the time is over."""
        changed = asyncio.create_task(self._changed.wait())
        timer = asyncio.ensure_future(self._sleep(timeout_s))
        try:
            await asyncio.wait({changed, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            timer.cancel()

    async def _poll_forever(self) -> None:
        while True:
            await self._sleep(self._config.membership_poll_s)
            await self._poll()

    async def _listen_for_silence(self) -> None:
        while True:
            await self._sleep(self._config.membership_poll_s)
            self._suspect_the_silent()
            self._abandon_the_silent()

    async def _clear_the_index(self) -> None:
        """What workers that are gone held is cleared away in pieces."""
        while True:
            await self._sleep(0.0 if self.index.clear_some() else self._config.membership_poll_s)

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(self._config.membership_timeout_s):
                announced = await self._source.announcements()
        except Exception as error:  # noqa: BLE001 - whatever it is, the last table stands
            _log.debug("membership is unknown: %s", error)
            return
        listed = {announcement.ref.worker_id: announcement for announcement in announced}
        for announcement in announced:
            self._admit(announcement)
        for entry in list(self._entries.values()):
            if entry.ref.worker_id not in listed and entry.state is not WorkerState.ALIVE:
                self._drop(entry)

    def _admit(self, announcement: Announcement) -> None:
        known = self._entries.get(announcement.ref.worker_id)
        if known is not None:
            if known.ref == announcement.ref:
                known.announcement = announcement
                return
            self._drop(known, is_process_left=known.announcement.block_epoch == announcement.block_epoch)
        entry = WorkerEntry(announcement, self._connect(announcement.ref), self._clock.now())
        self._entries[entry.ref.worker_id] = entry
        entry.task = asyncio.create_task(self._watch(entry), name=f"watch {entry.ref.worker_id}")

    def _drop(self, entry: WorkerEntry, is_process_left: bool = False) -> None:
        """Forget an incarnation: fail what hangs on it, end its Watch, close its connection. If its process
        goes on in another role, so does what it holds.
        """
        del self._entries[entry.ref.worker_id]
        self._departed[entry.ref.role] = entry.announcement
        self.repairs.end(entry.ref.worker_id)
        if is_process_left:
            self.index.cut(entry.ref.worker_id)
        else:
            self.index.forget(entry.ref.worker_id)
        self._set_state(entry, WorkerState.DEAD)
        if entry.task is not None:
            entry.task.cancel()
        closing = asyncio.create_task(self._close(entry))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, entry: WorkerEntry) -> None:
        if entry.task is not None:
            await asyncio.gather(entry.task, return_exceptions=True)
        await entry.worker.close()

    async def _watch(self, entry: WorkerEntry) -> None:
        """Follow one worker for as long as it is listed; after a break, try again."""
        while True:
            try:
                has_spoken = await self._follow(entry)
            except ServingError as error:
                _log.info("worker %s is gone: %s", entry.ref.worker_id, error.message)
            except Exception:  # noqa: BLE001 - logged; the worker counts as gone
                _log.exception("watching worker %s failed", entry.ref.worker_id)
            else:
                _log.info("worker %s ended its watch", entry.ref.worker_id)
                if has_spoken and not entry.is_draining:
                    # it lives, and did not say that it leaves; a watch that is closed ends without a word
                    await self._sleep(self._config.reconnect_s)
                    continue
            self._set_state(entry, WorkerState.DEAD)
            await self._sleep(self._config.reconnect_s)

    async def _follow(self, entry: WorkerEntry) -> bool:
        """Read one Watch to its end; whether it said anything."""
        has_spoken = False
        worker_id = entry.ref.worker_id
        # a set of hashes is no larger than the pool, but a stale view may hold two
        self.index.join(worker_id, entry.announcement.block_epoch, 2 * entry.announcement.num_blocks)
        events = entry.worker.watch()
        try:
            async for event in events:
                has_spoken = True
                entry.heard_at = self._clock.now()
                if event.status is not None:
                    was_draining = entry.is_draining
                    entry.take_status(event.status)
                    if entry.is_draining != was_draining:
                        self._signal()
                self.index.apply(worker_id, event)
                self.repairs.wake(worker_id, entry.worker)
                self._set_state(entry, WorkerState.ALIVE)
                if len(event.events) > _MANY_EVENTS:
                    await asyncio.sleep(0)
        finally:
            if self._entries.get(worker_id) is entry:
                self.index.cut(worker_id)
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
        return has_spoken

    def _suspect_the_silent(self) -> None:
        oldest = self._clock.now() - self._config.suspect_after_s
        for entry in self._entries.values():
            if entry.state is WorkerState.ALIVE and entry.heard_at < oldest:
                _log.info("worker %s is silent", entry.ref.worker_id)
                self._set_state(entry, WorkerState.SUSPECT)

    def _set_state(self, entry: WorkerEntry, state: WorkerState) -> None:
        if entry.state is state:
            return
        entry.state = state
        if state is WorkerState.DEAD:
            entry.abandon()
        elif state is WorkerState.ALIVE:
            entry.revive()
        self._abandon_the_silent()
        self._signal()

    def _abandon_the_silent(self) -> None:
        """Fail what runs on silent workers, if another one could take it over: decode can for both roles."""
        for entry in list(self._entries.values()):
            can_move = bool(self.usable(entry.ref.role) or self.usable(Role.DECODE))
            if entry.state is WorkerState.SUSPECT and can_move:
                entry.abandon()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
