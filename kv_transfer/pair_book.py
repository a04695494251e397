"""PairBook: of each worker that KV is handed to, by which way, how fast, and why not another way.

Owns these counts and their series for Prometheus, whose number is bounded: the pairs that were heard of least
recently are forgotten. Written on the IO loop; read from any thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core import telemetry
from core.ids import WorkerRef
from core.pair_status import PairStatus

_MAX_PAIRS = 256
_MEMORY = 0.8
"""What is left of the last tickets' bytes and seconds with each new one: the rate is of about five."""


@dataclass(slots=True)
class _Pair:
    ref: WorkerRef
    transport: str = ""
    num_bytes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    recent_bytes: float = 0.0
    recent_s: float = 0.0
    is_warm: bool = False
    problem: str = ""

    def status(self) -> PairStatus:
        return PairStatus(
            self.ref.worker_id,
            self.ref.epoch,
            self.transport,
            self.recent_bytes / self.recent_s if self.recent_s > 0 else 0.0,
            tuple(sorted(dict(self.num_bytes).items())),
            tuple(sorted(dict(self.fallbacks).items())),
            self.is_warm,
            self.problem,
        )


class PairBook(Collector):
    """One for each registry; the other end of a pair is named by worker and epoch."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pairs: OrderedDict[WorkerRef, _Pair] = OrderedDict()
        # for other threads: to go through the dictionary is to work out hashes, and meanwhile it may change
        self._all: tuple[_Pair, ...] = ()
        registry.register(self)

    def statuses(self) -> tuple[PairStatus, ...]:
        """By name."""
        pairs = [pair.status() for pair in self._all]
        return tuple(sorted(pairs, key=lambda pair: (pair.worker_id, pair.epoch)))

    def choose(self, ref: WorkerRef, transport: str, fallback: str) -> None:
        """An offer was answered: its payload takes this way; `fallback`: why not the wanted one."""
        pair = self._find(ref)
        pair.transport, pair.problem = transport, ""
        if fallback:
            pair.fallbacks[fallback] += 1

    def deliver(self, ref: WorkerRef, transport: str, num_bytes: int, seconds: float) -> None:
        """A ticket was committed, whose blocks waited for their acknowledgement that long altogether."""
        pair = self._find(ref)
        pair.transport, pair.problem = transport, ""
        if num_bytes > 0:
            pair.num_bytes[transport] += num_bytes
            pair.recent_bytes = _MEMORY * pair.recent_bytes + num_bytes
            pair.recent_s = _MEMORY * pair.recent_s + seconds

    def warm(self, ref: WorkerRef, transport: str) -> None:
        """It is ready."""
        pair = self._find(ref)
        pair.is_warm, pair.problem = True, ""
        pair.transport = pair.transport or transport

    def cool(self, ref: WorkerRef) -> None:
        """Nobody keeps it ready any more."""
        if (pair := self._pairs.get(ref)) is not None:
            pair.is_warm = False

    def fail(self, ref: WorkerRef, problem: str) -> None:
        """Nothing can be handed over at present."""
        self._find(ref).problem = problem

    def forget(self, ref: WorkerRef) -> None:
        """The worker is gone."""
        self._pairs.pop(ref, None)
        self._all = tuple(self._pairs.values())

    def _find(self, ref: WorkerRef) -> _Pair:
        pair = self._pairs.get(ref)
        if pair is None:
            pair = self._pairs[ref] = _Pair(ref)
            while len(self._pairs) > _MAX_PAIRS:
                self._pairs.popitem(last=False)
            self._all = tuple(self._pairs.values())
        self._pairs.move_to_end(ref)
        return pair

    def collect(self) -> Iterator[Metric]:
        """For Prometheus. The label `peer` is the other end's worker."""
        chosen = GaugeMetricFamily(
            telemetry.KV_PAIR_TRANSPORT,
            "1 for the way that a pair's payloads take",
            labels=["peer", "transport"],
        )
        speed = GaugeMetricFamily(
            telemetry.KV_PAIR_BYTES_PER_SECOND,
            "Payload of a pair's last tickets by the time in which they waited for acknowledgement",
            labels=["peer"],
        )
        carried = CounterMetricFamily(
            telemetry.KV_PAIR_BYTES, "Committed payload bytes of a pair", labels=["peer", "transport"]
        )
        fallbacks = CounterMetricFamily(
            telemetry.KV_PAIR_FALLBACKS,
            "Tickets of a pair whose payload did not go the best way that was wanted",
            labels=["peer", "reason"],
        )
        warm = 0
        by_name: dict[str, PairStatus] = {}
        for pair in self.statuses():
            warm += pair.is_warm
            by_name[pair.worker_id] = pair  # of two incarnations the last one: series are told apart by name
        for name, pair in by_name.items():
            if pair.transport:
                chosen.add_metric([name, pair.transport], 1.0)
            speed.add_metric([name], pair.bytes_per_s)
            for transport, num_bytes in pair.num_bytes:
                carried.add_metric([name, transport], num_bytes)
            for reason, count in pair.fallbacks:
                fallbacks.add_metric([name, reason], count)
        yield from (chosen, speed, carried, fallbacks)
        yield GaugeMetricFamily(
            telemetry.KV_WARM_PAIRS, "Pairs that were made ready before a request asked", value=warm
        )
