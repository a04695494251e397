"""Placed: one request on its way through the workers that were chosen for it.

Owns the load that is reserved there, from the moment of the decision until `close`, and the comparison of
what was predicted with what came. One per placement; lives on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from core.block_hash import BlockHash
from core.clock import Clock
from core.ids import RequestId
from core.kv_layout import KVLayout
from core.worker_status import num_pairs
from router.decision import Decision, Demand
from router.metrics import RouterMetrics
from router.speed_book import SpeedBook
from router.worker_entry import Reservation, WorkerEntry
from router.worker_table import WorkerTable

# the events of what was read come before the answer or just behind it
_EVENT_LAG_S = 2.0
_LONGEST_READING_S = 600.0

_log = logging.getLogger(__name__)


class Host(Protocol):
    """Whoever places requests."""

    @property
    def clock(self) -> Clock: ...

    @property
    def speeds(self) -> SpeedBook: ...

    @property
    def metrics(self) -> RouterMetrics: ...

    @property
    def table(self) -> WorkerTable: ...

    def freed(self) -> None:
        """A request has left its workers."""
        ...


class Placed:
    """Reserves when it is made: between the decision and this there must be no await."""

    def __init__(
        self,
        request_id: RequestId,
        demand: Demand,
        decision: Decision,
        workers: tuple[WorkerEntry | None, WorkerEntry | None],
        names: Mapping[KVLayout, Sequence[BlockHash]],
        host: Host,
        is_resume: bool = False,
    ) -> None:
        """`workers`: prefill and decode. `names`: the prompt's blocks. `is_resume`: the request was placed
        before, and that failed.
        """
        self._is_resume = is_resume
        self._request_id = request_id
        self._demand = demand
        self._decision = decision
        self._prefill, self._decode = workers
        self._host = host
        self._placed_at = host.clock.now()
        self._read_at: float | None = None
        self._is_joined = False
        self._is_closed = False
        self._held: list[tuple[WorkerEntry, Reservation]] = []
        reader = self._prefill or self._decode
        assert reader is not None
        self._index = host.table.index
        self._prediction = self._index.predict(
            reader.ref.worker_id,
            names.get(reader.announcement.layout, ()),
            self._placed_at + _LONGEST_READING_S,
        )
        self._num_cached = decision.num_cached_tokens
        for entry in filter(None, workers):
            candidate = decision.prefill if entry is self._prefill else decision.decode
            assert candidate is not None
            num_cached = self._num_cached if entry is reader else candidate.num_cached_tokens
            num_missing = max(1, demand.num_tokens - num_cached)
            reservation = Reservation(
                num_tokens=num_missing if entry is reader else 0,
                num_pairs=num_pairs(num_missing, num_cached) if entry is reader else 0.0,
                num_seqs=demand.num_samples,
                made_at=self._placed_at,
                num_blocks=candidate.layout.num_blocks(num_missing) + demand.num_samples,
            )
            entry.reserve(reservation)
            self._held.append((entry, reservation))

    def pulled(self, num_tokens: int) -> None:
        """The reader was sent what another worker had cached: `num_tokens` are there now, 0 if it failed."""
        self._num_cached = max(self._decision.reader.num_cached_tokens, num_tokens)
        self._placed_at = self._host.clock.now()

    def heard(self, num_cached_tokens: int) -> None:
        """A worker has sent tokens. First whoever read the prompt: it found `num_cached_tokens` of it in its
        cache. Then, after a handoff, decode.
        """
        if self._is_joined or self._is_closed:
            return
        if self._read_at is None:
            self._read(self._host.clock.now(), num_cached_tokens)
            self._is_joined = self._prefill is None
        elif self._decode is not None:
            self._join(self._host.clock.now() - self._read_at)
            self._is_joined = True

    def close(self) -> None:
        """The request has ended here, one way or the other. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._read_at is None:
            self._index.withdraw(self._prediction)
        for entry, reservation in self._held:
            entry.release(reservation)
        self._host.freed()

    def _read(self, now: float, num_cached: int) -> None:
        self._read_at = now
        self._index.end_by(self._prediction, now + _EVENT_LAG_S)
        entry, reservation = self._held[0]
        if entry is self._prefill:
            entry.release(reservation)
        else:
            entry.begin_stream(reservation)
        reader, terms = self._decision.reader, self._decision.terms
        self._host.metrics.predicted_cached(self._num_cached, num_cached)
        if self._is_resume:
            self._host.metrics.reuse.resumed(num_cached, self._demand.num_tokens - num_cached)
        entry.rates.observe_hit(self._num_cached, num_cached)
        if "prefill" not in terms:
            return
        predicted_ms, actual_ms = terms["queue"] + terms["prefill"], (now - self._placed_at) * 1e3
        # a wrong guess of what is cached is the credit's fault, not the pace's
        predicted = self._decision.num_cached_tokens
        num_missing = max(1, self._demand.num_tokens - predicted)
        if abs(num_cached - predicted) <= 0.1 * num_missing + reader.layout.block_size:
            entry.rates.observe_reading(predicted_ms, actual_ms)
        self._tell("reading", predicted_ms, actual_ms, num_cached)

    def _join(self, seconds: float) -> None:
        assert self._prefill is not None
        assert self._decode is not None
        for entry, reservation in self._held:
            if entry is self._decode:
                entry.begin_stream(reservation)
        decode, terms = self._decision.decode, self._decision.terms
        if decode is None or "handoff" not in terms:
            return
        # the second token would have taken a step without a handoff, too
        actual_ms = max(0.0, seconds * 1e3 - terms["decode"] / max(1, self._demand.num_output_tokens))
        num_missing = max(0, self._demand.num_tokens - decode.num_cached_tokens)
        self._prefill.rates.observe_handoff(
            decode.ref.worker_id,
            num_missing * decode.layout.bytes_per_token,
            actual_ms,
            self._host.speeds.distances.assumed(self._prefill.announcement, self._decode.announcement),
        )
        self._tell("handoff", terms["transfer"] + terms["handoff"], actual_ms, decode.num_cached_tokens)

    def _tell(self, part: str, predicted_ms: float, actual_ms: float, num_cached: int) -> None:
        self._host.metrics.predicted(part, predicted_ms, actual_ms)
        if not _log.isEnabledFor(logging.DEBUG):
            return
        candidate = self._decision.reader
        _log.debug(
            "%s %s %s: predicted %.1f ms, was %.1f; cached %d of %d, was %d; ahead %d, streams %d; %s not %s",
            self._request_id,
            self._decision.plan,
            part,
            predicted_ms,
            actual_ms,
            candidate.num_cached_tokens,
            self._demand.num_tokens,
            num_cached,
            candidate.num_ahead_tokens,
            candidate.num_streams,
            {term: round(cost, 1) for term, cost in self._decision.terms.items()},
            [
                (other.plan.value, {term: round(cost, 1) for term, cost in other.terms.items()})
                for other in self._decision.others
            ],
        )
