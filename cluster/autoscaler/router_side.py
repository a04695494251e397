"""RouterScaling: a router's part in autoscaling: what it reports, and what it knows of pools that sleep.

Owns asking the registry for the last decision, each second. A pool that was scaled to zero on purpose wakes
for the next request, so the service is ready without it; but not for ever if it does not come. Lives on the
router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.news import ScalingCounts, ScalingNews
from core.clock import Clock
from core.ids import Role

Ask = Callable[[], Awaitable[tuple[ScalingNews | None, ScalingCounts]]]

_PERIOD_S = 1.0
_LATE_AFTER = 3.0

_log = logging.getLogger(__name__)


class RouterScaling:
    """`ask` gets the last decision; it raises ConnectionError while nobody knows."""

    def __init__(self, config: AutoscalingConfig, ask: Ask, clock: Clock) -> None:
        self._config = config
        self._ask = ask
        self._clock = clock
        self._latest: tuple[ScalingNews | None, ScalingCounts] = (None, ScalingCounts())
        self._asleep_until: dict[Role, float] = {}

    async def keep(self) -> None:
        """Stay informed, until cancelled."""
        while True:
            try:
                self.take(*await self._ask())
            except ConnectionError as error:
                _log.debug("the last decision stands: %s", error)
            await asyncio.sleep(_PERIOD_S)

    def take(self, news: ScalingNews | None, counts: ScalingCounts) -> None:
        """The last decision, as the registry has it."""
        self._latest = (news, counts)
        for role in Role if news is not None else ():
            assert news is not None
            pool = news.of(role)
            if pool.num_applied == 0:
                self._asleep_until[role] = self._clock.now() + _LATE_AFTER * self._config.startup_s
            elif pool.num_running > 0:
                self._asleep_until.pop(role, None)

    def latest(self) -> tuple[ScalingNews | None, ScalingCounts]:
        return self._latest

    def asleep(self) -> tuple[Role, ...]:
        """Pools at zero that a request wakes, or that are waking and not yet late."""
        now = self._clock.now()
        return tuple(role for role, until in self._asleep_until.items() if now < until)
