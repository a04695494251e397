"""Leases: this replica's parts of all limits, drawn ahead of use from whoever owns the limits.

Owns the buckets by limit and the one task that squares them with the owner, so that no call goes out for a
request: only one that meets an empty bucket, while tokens are free elsewhere, waits for the next round. While
the owner is away or new, each replica has an equal part of every limit. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping

from core.clock import Clock
from router.buckets import Bucket
from router.limits import Holding, LimitKind, LimitName, LimitOwner, Order, Orders, Report
from router.promises import Promises

MINUTE_S = 60.0
# a replica keeps at most this part of a limit ahead of use
_AHEAD = 16
# and nothing ahead of a use that did not come for so long
_IDLE_S = 10.0
# a replica that has not left what was claimed of it after so long does not have it any more
_OWED_S = 5.0
# rounds follow each other at least so far apart, however many wait
_MIN_PERIOD_S = 0.02
# after so long without an owner its grants are not waited for
_ALONE_AFTER_S = 3.0

_log = logging.getLogger(__name__)


class Lease:
    """One limit as this replica has it. `size`: the whole limit. `num_elsewhere`: free tokens that others
    had at the last round; `num_asked`: what those that wait here need, all together; `num_promised`: what is
    kept for calls that were told to come back here; `num_owed`: what others kept for calls that came here;
    `num_owing`: what was kept here for calls that went to others, and had not come back yet when they did.
    """

    def __init__(self, name: LimitName, size: int) -> None:
        self.name = name
        self.size = size
        self.bucket = Bucket(math.inf if name.kind is LimitKind.CONCURRENT_TOKENS else MINUTE_S)
        self.num_elsewhere = size
        self.num_asked = 0
        self.num_promised = 0
        self.num_owed = 0
        self.num_owing = 0
        self._owed_until = -math.inf
        self.used_at = -math.inf

    @property
    def ahead(self) -> int:
        return max(1, self.size // _AHEAD)

    def num_left(self, now: float) -> int:
        """Free tokens of the whole limit, as far as this replica knows."""
        return min(self.size, self.bucket.num_free(now) + self.num_elsewhere)

    def holding(self, now: float) -> Holding:
        """What to report. What is asked for beyond the free tokens is wanted, else what keeps `ahead`."""
        if now > self._owed_until:
            self.num_owed = 0
        free, room = self.bucket.num_free(now), self.size - self.bucket.held
        asked = max(0, min(max(0, self.num_asked - free) + self.num_owed, room))
        wanted = max(asked, min(self._target(now) - free, room))
        spare = max(0, free - self.num_promised)
        return Holding(self.name, self.size, self.bucket.held, spare, wanted, asked, self.bucket.period_s)

    def obey(self, order: Order, now: float) -> bool:
        """Take what is granted and leave what is recalled, unless it is waited for here; whether any left."""
        self.bucket.add(order.num_granted)
        self.num_owed = max(0, self.num_owed - order.num_granted)
        self.num_elsewhere = order.num_elsewhere
        if self.num_asked:
            return False
        spare = max(0, self.bucket.num_free(now) - self.num_promised)
        return self._leave(min(order.num_recalled, spare), now) > 0

    def return_surplus(self, now: float) -> None:
        """Leave what is not needed ahead to the others; told to the owner with the next report."""
        self.num_owing -= self.bucket.remove(self.num_owing, now)
        target = max(self.num_asked, self.num_promised, 2 * self._target(now))
        self._leave(max(self.bucket.num_free(now) - target, self.bucket.held - self.size), now)

    def _leave(self, amount: int, now: float) -> int:
        left = self.bucket.remove(max(0, amount), now)
        self.num_elsewhere += left
        return left

    def _target(self, now: float) -> int:
        """Free tokens to keep ahead of use: none where nobody used any for a while."""
        return self.ahead if now - self.used_at < _IDLE_S else 0

    def hand_over(self, amount: int, now: float) -> None:
        """Leave tokens that another replica waits for by name, those that are not back yet once they are."""
        self.num_owing += amount - self.bucket.remove(amount, now)

    def claim(self, amount: int, now: float) -> None:
        """Another replica is to leave so much to this one."""
        self.num_owed += amount
        self._owed_until = now + _OWED_S

    def take_part(self, num_replicas: int, now: float) -> None:
        """Hold an equal part, as far as what is out allows it."""
        part = max(1, self.size // max(1, num_replicas))
        if self.bucket.held < part:
            self.bucket.add(part - self.bucket.held)
        else:
            self.bucket.remove(self.bucket.held - part, now)
        self.num_elsewhere = self.num_owed = self.num_owing = 0


class Leases:
    """One per router. `num_replicas`: how many routers are expected; more are noticed."""

    def __init__(self, owner: LimitOwner, clock: Clock, period_s: float, num_replicas: int = 1) -> None:
        self._owner = owner
        self._clock = clock
        self._period_s = period_s
        self._expected = num_replicas
        self._replica = secrets.token_hex(8)
        self._number = 0
        self._leases: dict[LimitName, Lease] = {}
        self.promises = Promises(clock)
        self._wanted = asyncio.Event()
        self._round_done = asyncio.Event()
        self._answered_at = clock.now()
        self.num_replicas = num_replicas
        self.is_alone = False

    def lease(self, name: LimitName, size: int) -> Lease:
        """The lease of a limit, made at its first use. `size` is what the limit is from now on."""
        known = self._leases.get(name)
        if known is None:
            known = self._leases[name] = Lease(name, size)
        if known.size != size or known.bucket.held == 0:
            known.size = size
            self._wanted.set()
        return known

    def all(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    def try_claim(self, scope: str, call: int, needs: Mapping[Lease, int]) -> bool:
        """Whether another router keeps what this call needs; it is asked to hand it over."""
        is_promised = self.promises.try_claim(scope, call)
        if is_promised:
            for lease, amount in needs.items():
                lease.claim(amount, self._clock.now())
            self._wanted.set()
        return is_promised

    async def until_free(self, needs: Mapping[Lease, int], timeout_s: float, is_promised: bool) -> bool:
        """Whether all that is needed is free here, after more rounds if others have some free, or keep some
        for this call.
        """
        for lease, amount in needs.items():
            lease.num_asked += amount
        try:
            async with asyncio.timeout(timeout_s):
                while not self._are_free(needs):
                    if self.is_alone or not (is_promised or self._could_be_free(needs)):
                        return False
                    self._wanted.set()
                    await self._round_done.wait()
        except TimeoutError:
            return False
        finally:
            for lease, amount in needs.items():
                lease.num_asked -= amount
        return True

    def _are_free(self, needs: Mapping[Lease, int]) -> bool:
        now = self._clock.now()
        return all(lease.bucket.num_free(now) >= amount for lease, amount in needs.items())

    def _could_be_free(self, needs: Mapping[Lease, int]) -> bool:
        now = self._clock.now()
        return all(
            lease.bucket.num_free(now) + lease.num_elsewhere >= amount for lease, amount in needs.items()
        )

    async def keep(self) -> None:
        """Square the parts with the owner, every period and whenever somebody waits; until cancelled."""
        while True:
            try:
                await self.square()
            except Exception as error:  # noqa: BLE001 - logged; without rounds no limit would be refilled
                _log.exception("a round with the owner of the limits failed")
                self._is_away(error)
            await asyncio.sleep(_MIN_PERIOD_S)
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass  # the ordinary round

    async def square(self) -> None:
        """One round: report, obey, and wake who waits."""
        self._wanted.clear()
        now = self._clock.now()
        for lease in self._leases.values():
            if not self.is_alone:
                lease.return_surplus(now)
        self._number += 1
        report = Report(
            self._replica,
            self._number,
            tuple(item.holding(now) for item in self.all()),
            self.promises.told(),
            self.promises.take_claims(),
        )
        try:
            orders = await self._owner.exchange(report)
        except ConnectionError as error:
            self._is_away(error)
        else:
            self._obey(orders)
        self._round_done.set()
        self._round_done = asyncio.Event()

    async def leave(self) -> None:
        """Return all that is free: this replica ends."""
        now = self._clock.now()
        for lease in self._leases.values():
            lease.bucket.remove(lease.bucket.held, now)
        self._number += 1
        holdings = (item.holding(now) for item in self.all())
        told = tuple(Holding(h.name, h.size, h.num_held, 0, 0, 0, h.back_s) for h in holdings)
        try:
            await self._owner.exchange(Report(self._replica, self._number, told))
        except ConnectionError as error:
            _log.info("the limits' owner does not hear that this router ends: %s", error)

    def _obey(self, orders: Orders) -> None:
        now = self._answered_at = self._clock.now()
        self.num_replicas = max(1, orders.num_replicas)
        if self.is_alone:
            _log.warning("the owner of the limits answers again")
            self.is_alone = False
        for order in orders.orders:
            lease = self._leases[order.name]
            if lease.obey(order, now):
                self._wanted.set()  # another router waits for it
            if not orders.is_settled:
                lease.take_part(max(self._expected, orders.num_replicas), now)
        if self.promises.hear(orders.promised, orders.claimed):
            self._wanted.set()

    def _is_away(self, error: Exception) -> None:
        now = self._clock.now()
        if now - self._answered_at < _ALONE_AFTER_S:
            return
        if not self.is_alone:
            _log.warning("the owner of the limits is away, each router keeps an equal part: %s", error)
            self.is_alone = True
        for lease in self._leases.values():
            lease.take_part(max(self._expected, self.num_replicas), now)
