"""Placer: the workers of the table as candidates of a placement, for one request at a time.

Owns how the table, the prefix index and a request's setbacks become the values that `placement` decides on.
Does not wait and does not call. Lives on the event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from core.block_hash import BlockHash, hash_blocks, root_hash
from core.ids import Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.request import Request
from router.config import RouterConfig
from router.placement import Candidate, Decision, Demand, place
from router.setbacks import Setbacks
from router.worker_entry import WorkerEntry
from router.worker_table import WorkerTable


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision and the workers it means."""

    decision: Decision
    prefill: WorkerEntry | None
    decode: WorkerEntry | None


class Placer:
    """One per router."""

    def __init__(self, config: RouterConfig, table: WorkerTable, chance: random.Random) -> None:
        self.config = config
        self.table = table
        self.chance = chance

    def seek(self, request: Request, tokens: Sequence[int], demand: Demand) -> Search:
        """A search for workers that read `tokens` (prompt and emitted) of `request`; its blocks are
        named once.
        """
        return Search(self, request, tokens, demand)


class Search:
    """May be asked again as the table changes."""

    def __init__(self, placer: Placer, request: Request, tokens: Sequence[int], demand: Demand) -> None:
        self._placer = placer
        self._request = request
        self._tokens = tokens
        self._demand = demand
        self._names: dict[str, list[BlockHash]] = {}

    def choose(self, setbacks: Setbacks, now: float) -> Chosen | None:
        """The cheapest choice at `now`; None if no worker can serve the demand."""
        decision = place(
            self._demand,
            self._candidates(Role.PREFILL, setbacks, now),
            self._candidates(Role.DECODE, setbacks, now),
            self._placer.config,
            self._placer.chance,
        )
        if decision is None:
            return None
        return Chosen(decision, self._entry_of(decision.prefill), self._entry_of(decision.decode))

    def answerers(self) -> list[WorkerRef]:
        """The known workers whose role lets them answer without another's help, whatever their state."""
        return [entry.ref for entry in self._answerers()]

    def usable_answerers(self) -> list[WorkerRef]:
        """Those of them that live and take work."""
        return [entry.ref for entry in self._answerers() if entry.is_usable]

    def _answerers(self) -> list[WorkerEntry]:
        roles = (Role.DECODE, Role.PREFILL) if self._demand.is_ended_by_prefill else (Role.DECODE,)
        return [entry for entry in self._placer.table.entries() if entry.ref.role in roles]

    def _candidates(self, role: Role, setbacks: Setbacks, now: float) -> list[Candidate]:
        usable = self._placer.table.usable(role)
        entries = [entry for entry in usable if not setbacks.is_avoided(entry.ref, now)]
        layouts = {entry.announcement.layout.fingerprint: entry.announcement.layout for entry in entries}
        matches = {name: self._match(layout) for name, layout in layouts.items()}
        return [
            Candidate(
                ref=entry.ref,
                layout=entry.announcement.layout,
                status=entry.status,
                num_cached_tokens=matches[entry.announcement.layout.fingerprint].get(entry.ref.worker_id, 0),
                num_reserved_tokens=entry.num_reserved_tokens,
                num_reserved_seqs=entry.num_reserved_seqs,
                is_handoff_target=setbacks.is_handoff_target(entry.ref),
            )
            for entry in entries
        ]

    def _match(self, layout: KVLayout) -> dict[WorkerId, int]:
        """Worker → tokens of the longest prefix it holds, in blocks of `layout`."""
        if not self._request.is_prefix_cache_read:
            return {}
        names = self._names.get(layout.fingerprint)
        if names is None:
            root = root_hash(self._request.cache_salt, layout.fingerprint, self._request.adapter)
            names = self._names[layout.fingerprint] = hash_blocks(root, self._tokens, layout.block_size)
        return {
            worker_id: num_blocks * layout.block_size
            for worker_id, num_blocks in self._placer.table.index.match(names).items()
        }

    def _entry_of(self, candidate: Candidate | None) -> WorkerEntry | None:
        return None if candidate is None else self._placer.table.entry(candidate.ref)
