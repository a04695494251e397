"""Placer: the workers of the table as candidates of a placement, for one request at a time.

Owns how the table, the prefix index and a request's setbacks become the values that `placement` decides on,
and that a decision and its reservation are one step. Does not call. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from core.block_hash import BlockHash, hash_blocks, root_hash
from core.clock import Clock
from core.ids import Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.request import Request
from router.config import RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.metrics import RouterMetrics
from router.placed import Placed
from router.placement import place
from router.pulls import Loan
from router.setbacks import Setbacks
from router.speed_book import SpeedBook
from router.worker_entry import WorkerEntry
from router.worker_table import WorkerTable


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision, the workers it means, and what is reserved there; nothing is while it says to wait."""

    decision: Decision
    prefill: WorkerEntry | None = None
    decode: WorkerEntry | None = None
    placed: Placed | None = None
    loan: Loan | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """Worker → how many blocks of a prompt, from the first on, it has told or is expected to hold."""

    told: Mapping[WorkerId, int]
    expected: Mapping[WorkerId, int]


MAX_WOKEN = 16
"""Held requests that look again when one request has left its workers. It makes room for about one; but the
first may wait for another worker.
"""


class Placer:
    """One per router."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        metrics: RouterMetrics,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self.config = config
        self.table = table
        self.metrics = metrics
        self.clock = clock
        self.speeds = SpeedBook(config, table, clock)
        self.draw = Draw(chance)
        self._held: dict[asyncio.Future[None], None] = {}

    def demand(self, request: Request, num_emitted: int, num_samples: int) -> Demand:
        """What `num_samples` of a request's samples need that have `num_emitted` tokens each."""
        num_left = request.sampling.max_tokens - num_emitted
        num_output = min(max(1, num_left), self.config.assumed_output_tokens)
        return Demand(request.num_prompt_tokens + num_emitted, num_samples, num_left <= 1, num_output)

    def seek(self, request: Request, tokens: Sequence[int], demand: Demand) -> Search:
        """A search for workers that read `tokens` (prompt and emitted) of `request`; its blocks are
        named once.
        """
        return Search(self, request, tokens, demand)

    def freed(self) -> None:
        """A request has left its workers: the next of those that are held look again, not all of them, which
        would be work for each that is held at each end of a request. Who is held on comes last again.
        """
        for called in list(islice(self._held, MAX_WOKEN)):
            del self._held[called]
            called.set_result(None)

    async def hold(self, timeout_s: float) -> None:
        """Until a request leaves its workers, a worker comes or goes, or the time is over."""
        called = asyncio.get_running_loop().create_future()
        self._held[called] = None
        change = asyncio.ensure_future(self.table.wait_for_change(timeout_s))
        try:
            await asyncio.wait([called, change], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._held.pop(called, None)
            change.cancel()


class Search:
    """May be asked again as the table changes. `urgent_at`: from then on it gives way to nobody."""

    def __init__(self, placer: Placer, request: Request, tokens: Sequence[int], demand: Demand) -> None:
        self._placer = placer
        self._request = request
        self._is_cache_read = request.is_prefix_cache_read
        self._tokens = tokens
        self._demand = demand
        self._names: dict[KVLayout, list[BlockHash]] = {}
        self._found: dict[KVLayout, _Found] = {}
        self._found_at: float | None = None
        self._held_until: float | None = None
        self._sought_at: float | None = None
        self.urgent_at = math.inf

    def name_blocks(self) -> None:
        """Hash the prompt for all layouts there are; done by the first choice if not before."""
        for entry in self._placer.table.entries():
            self._name(entry.announcement.layout)

    def choose(self, setbacks: Setbacks, now: float) -> Chosen | None:
        """The best choice at `now`, reserved at once unless it is to wait; None if no worker can serve the
        demand.
        """
        decision = self.decide(setbacks, now)
        if decision is None:
            return None
        if decision.plan is Plan.WAIT:
            if self._held_until is None and not decision.gives_way:
                self._held_until = now + self._placer.config.max_hold_s
            return Chosen(decision)
        self._placer.draw.turn += 1
        workers = (self._entry_of(decision.prefill), self._entry_of(decision.decode))
        placed = Placed(
            self._request.request_id,
            self._demand,
            decision,
            workers,
            self._names,
            self._placer,
            is_resume=setbacks.has_failed or len(self._tokens) > self._request.num_prompt_tokens,
        )
        return Chosen(decision, *workers, placed, self._loan(decision))

    def decide(self, setbacks: Setbacks, now: float) -> Decision | None:
        """What `choose` would choose, without a trace."""
        if self._sought_at is None:
            self._sought_at = now
        is_begun = len(self._tokens) > self._request.num_prompt_tokens
        has_time = now < self.urgent_at and not is_begun
        demand = replace(
            self._demand,
            can_wait=self._held_until is None or now < self._held_until,
            waited_ms=(now - self._sought_at) * 1e3 if has_time else None,
        )
        return place(
            demand,
            self.candidates(Role.PREFILL, setbacks, now),
            self.candidates(Role.DECODE, setbacks, now),
            self._placer.config,
            self._placer.draw,
        )

    def hold_s(self, decision: Decision, now: float) -> float:
        """How long to hold the request back before asking again, if no worker is left before that."""
        until = self._held_until
        if decision.gives_way:
            until = min(now + self._placer.config.max_hold_s, self.urgent_at)
        assert until is not None
        return max(0.001, min(decision.terms["wait"] / 1e3, until - now))

    def answerers(self) -> list[WorkerRef]:
        """The known workers whose role lets them answer without another's help, whatever their state."""
        return [entry.ref for entry in self._answerers()]

    def usable_answerers(self) -> list[WorkerRef]:
        """Those of them that live and take work."""
        return [entry.ref for entry in self._answerers() if entry.is_usable]

    def _answerers(self) -> list[WorkerEntry]:
        roles = (Role.DECODE, Role.PREFILL) if self._demand.is_ended_by_prefill else (Role.DECODE,)
        return [entry for entry in self._placer.table.entries() if entry.ref.role in roles]

    def candidates(self, role: Role, setbacks: Setbacks, now: float) -> list[Candidate]:
        """The workers of `role` that may be chosen, as placement sees them."""
        usable = self._placer.table.usable(role)
        entries = [entry for entry in usable if not setbacks.is_avoided(entry.ref, now)]
        found = {
            layout: self._find(layout, now) for layout in {entry.announcement.layout for entry in entries}
        }
        return [
            self._candidate(entry, found[entry.announcement.layout], setbacks.is_handoff_target(entry.ref))
            for entry in entries
        ]

    def _candidate(self, entry: WorkerEntry, found: _Found, is_handoff_target: bool) -> Candidate:
        announcement, rates, worker_id = entry.announcement, entry.rates, entry.ref.worker_id
        layout = announcement.layout
        confidence = self._placer.table.index.confidence(worker_id)
        num_told = int(found.told.get(worker_id, 0) * rates.credit * confidence)
        # what is being read there now will be cached when this prompt's turn comes
        num_cached = max(num_told, found.expected.get(worker_id, 0))
        return Candidate(
            ref=entry.ref,
            layout=layout,
            status=entry.status,
            node=announcement.node,
            zone=announcement.zone,
            speeds=self._placer.speeds.of(entry),
            pace=rates.pace,
            handoffs=rates.handoffs,
            num_cached_tokens=num_cached * layout.block_size,
            num_told_tokens=num_told * layout.block_size,
            num_ahead_tokens=entry.num_ahead_tokens,
            num_ahead_pairs=entry.num_ahead_pairs,
            num_kv_tokens=entry.num_kv_blocks * layout.block_size,
            num_streams=entry.num_streams,
            num_seqs=entry.num_seqs,
            num_active=entry.num_active,
            num_pending_blocks=entry.num_pending_blocks,
            is_handoff_target=is_handoff_target,
        )

    def _find(self, layout: KVLayout, now: float) -> _Found:
        """The index's answer; both roles of one choice share it."""
        if not self._is_cache_read:
            return _Found({}, {})
        if now != self._found_at:
            self._found.clear()
            self._found_at = now
        if layout not in self._found:
            index, names = self._placer.table.index, self._name(layout)
            self._found[layout] = _Found(index.told(names), index.expected(names))
        return self._found[layout]

    def _name(self, layout: KVLayout) -> list[BlockHash]:
        """The prompt's full blocks by name, in blocks of `layout`."""
        names = self._names.get(layout)
        if names is None:
            root = root_hash(self._request.cache_salt, layout.fingerprint, self._request.adapter)
            names = self._names[layout] = hash_blocks(root, self._tokens, layout.block_size)
        return names

    def _loan(self, decision: Decision) -> Loan | None:
        source = self._entry_of(decision.pull_from)
        if source is None:
            return None
        layout = source.announcement.layout
        return Loan(source, tuple(self._name(layout)[: decision.num_cached_tokens // layout.block_size]))

    def _entry_of(self, candidate: Candidate | None) -> WorkerEntry | None:
        return None if candidate is None else self._placer.table.entry(candidate.ref)
