"""The real placer for a simulated router, and the place where another policy may choose in its stead.

Owns no decision. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.simulator.events import Events
from cluster.simulator.fleet import Fleet
from core.block_hash import BlockHash
from core.ids import Role
from core.request import Request
from router.config import RouterConfig
from router.decision import Candidate, Decision, Demand, Draw
from router.metrics import RouterMetrics
from router.placer import Placer, Search
from router.setbacks import Setbacks


class Chooser(Protocol):
    """A policy of another kind, for comparison: it may remember what it has sent where."""

    def choose(
        self,
        names: Sequence[BlockHash],
        demand: Demand,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        draw: Draw,
    ) -> Decision | None: ...

    def placed(self, number: int, names: Sequence[BlockHash], decision: Decision) -> None:
        """The request of that number goes there."""
        ...

    def read(self, number: int) -> None:
        """Its first token has come."""
        ...

    def ended(self, number: int) -> None:
        """It is nowhere any more."""
        ...


class SitePlacer(Placer):
    """`on_freed` hears when a request has left its workers; `chooser` decides in place of the policy, if
    there is one.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        events: Events,
        chance: random.Random,
        chooser: Chooser | None,
        on_freed: Callable[[], None],
    ) -> None:
        super().__init__(config, fleet, RouterMetrics(), events, chance)
        self.chooser = chooser
        self._on_freed = on_freed

    def freed(self) -> None:
        self._on_freed()

    def seek(self, request: Request, tokens: Sequence[int], demand: Demand) -> SiteSearch:
        return SiteSearch(self, request, tokens, demand)


class SiteSearch(Search):
    """The real search; its candidates are given to the chooser, if there is one."""

    def __init__(self, placer: SitePlacer, request: Request, tokens: Sequence[int], demand: Demand) -> None:
        super().__init__(placer, request, tokens, demand)
        self._chooser = placer.chooser

    def names(self) -> Sequence[BlockHash]:
        """The prompt's full blocks, in blocks of the one layout that all workers have."""
        self.name_blocks()
        return next(iter(self._names.values()), ())

    def decide(self, setbacks: Setbacks, now: float) -> Decision | None:
        if self._chooser is None:
            return super().decide(setbacks, now)
        return self._chooser.choose(
            self.names(),
            self._demand,
            self.candidates(Role.PREFILL, setbacks, now),
            self.candidates(Role.DECODE, setbacks, now),
            self._placer.draw,
        )
