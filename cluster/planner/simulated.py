"""How many workers of each pool, by trying: the arithmetic's plan, corrected by simulating it.

Owns the prices of a worker as the simulator wants them (the roofline's terms added up, which is a little
slower than the slower of them) and the search over counts. The simulator runs the real schedulers, placement
and bridge; both pools have one kind of worker there. Pure but for the time it takes: seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.loadtest.traces import MOONCAKE_BLOCK_TOKENS, TraceRecord
from cluster.planner.capacity import Capacity
from cluster.planner.hardware import Link
from cluster.planner.plan import ATTAINMENT, Targets, Workload
from cluster.simulator.deployment import Deployment
from cluster.simulator.record import Record
from cluster.simulator.simulation import Simulation
from cluster.simulator.step_price import LinkPrice, StepPrice
from cluster.simulator.workload import arrivals_of
from core.errors import InvalidConfig
from core.kv_layout import KVLayout
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

_BLOCK_SIZE = 16
_MAX_SEQUENCES = 1024
# beyond so many times the arithmetic's counts something is wrong with the question
_GIVE_UP_AT = 4
_PLENTY = 1_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """Counts that were simulated (`num_prefill` 0: aggregated, each worker does both), and the shares of
    requests that kept each target and both.
    """

    num_prefill: int
    num_decode: int
    ttft_share: float
    itl_share: float
    share: float

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def is_enough(self) -> bool:
        return self.share >= ATTAINMENT


class SimulatedSearch:
    """Tries counts of `worker` for `workload`: `num_requests` of it, Poisson, the same ones each time."""

    def __init__(
        self,
        worker: Capacity,
        workload: Workload,
        targets: Targets,
        link: Link,
        num_requests: int,
        tell: Callable[[Trial], None],
        seed: int = 0,
    ) -> None:
        if num_requests < 20:
            raise InvalidConfig("a simulation takes at least 20 requests", key="simulate")
        self._worker = worker
        self._targets = targets
        self._tell = tell
        self._link = LinkPrice(link.bytes_per_s * worker.shares.link)
        self._num_streams = worker.max_batch(workload.mean_context, workload.longest, targets.itl_s)
        self._arrivals = arrivals_of(requests_of(workload, num_requests, seed))
        self._known: dict[tuple[int, int], Trial] = {}

    def disaggregated(self, num_prefill: int, num_decode: int) -> Trial:
        """The fewest workers, from these counts on: grow what misses its target, then take away what is not
        missed. Raises InvalidConfig if several times as many are not enough.
        """
        most = _GIVE_UP_AT * (num_prefill + num_decode)
        best = self.trial(num_prefill, num_decode)
        while not best.is_enough:
            if best.num_workers >= most:
                raise InvalidConfig(
                    f"simulated, {best.num_prefill} + {best.num_decode} workers keep both targets for "
                    f"{best.share:.0%} only",
                    key="slo",
                )
            more = (1, 0) if best.ttft_share <= best.itl_share else (0, 1)
            best = self.trial(best.num_prefill + more[0], best.num_decode + more[1])
        return self._fewer(best)

    def aggregated(self, num_workers: int) -> Trial | None:
        """The same for workers that each do both; None if several times as many are not enough."""
        best = self.trial(0, num_workers)
        while not best.is_enough:
            if best.num_workers >= _GIVE_UP_AT * num_workers:
                return None
            best = self.trial(0, best.num_decode + 1)
        return self._fewer(best)

    def _fewer(self, best: Trial) -> Trial:
        is_shrinking = True
        while is_shrinking:
            is_shrinking = False
            for less in ((1, 0), (0, 1)):
                prefill, decode = best.num_prefill - less[0], best.num_decode - less[1]
                if prefill < min(1, best.num_prefill) or decode < 1:
                    continue
                trial = self.trial(prefill, decode)
                if trial.is_enough:
                    best, is_shrinking = trial, True
        return best

    def trial(self, num_prefill: int, num_decode: int) -> Trial:
        key = (num_prefill, num_decode)
        if key not in self._known:
            records = Simulation(self._deployment(*key)).play(self._arrivals).records
            kept = [self._kept(record) for record in records]
            self._known[key] = Trial(
                num_prefill,
                num_decode,
                ttft_share=sum(ttft for ttft, _ in kept) / len(kept),
                itl_share=sum(itl for _, itl in kept) / len(kept),
                share=sum(ttft and itl for ttft, itl in kept) / len(kept),
            )
            self._tell(self._known[key])
        return self._known[key]

    def _kept(self, record: Record) -> tuple[bool, bool]:
        times = record.token_times
        if record.error or not times:
            return False, False
        per_token = (times[-1] - times[0]) / max(1, len(times) - 1)
        return times[0] - record.arrival_s <= self._targets.ttft_s, per_token <= self._targets.itl_s

    def _deployment(self, num_prefill: int, num_decode: int) -> Deployment:
        worker, shape = self._worker, self._worker.shape
        layout = KVLayout(
            shape.name,
            shape.num_layers,
            1,
            max(1, round(shape.kv_values * shape.kv_bits / 32)),
            _BLOCK_SIZE,
            "float16",
        )
        price = prices_of(worker, self._num_streams)
        router = RouterConfig(
            max_concurrency=_PLENTY,
            max_queue=_PLENTY,
            pull_timeout_s=0.0,
            assumed_prefill_tokens_per_s=1.0 / price.token_s,
            assumed_step_s=price.fixed_s,
            assumed_core_sharing=1.0,
        )
        sequences = min(_MAX_SEQUENCES, max(1, worker.num_sequences(1)))
        return Deployment(
            layout,
            max(1, int(worker.kv_budget_bytes // (worker.kv_copies * layout.block_bytes))),
            price,
            self._link,
            num_prefill,
            num_decode,
            prefill=PrefillConfig(token_budget=8192, max_num_seqs=256, max_waiting=_PLENTY),
            decode=DecodeConfig(
                max_num_seqs=sequences, token_budget=2048, prefill_chunk=512, max_waiting=_PLENTY
            ),
            router=router,
        )


def requests_of(workload: Workload, num_requests: int, seed: int) -> list[TraceRecord]:
    """Poisson arrivals. What is cached of each prompt is the same beginning of all of them, so that streams
    attend to it, too.
    """
    chance, now, records = random.Random(seed), 0.0, []
    size = workload.num_cached
    num_own = -(-workload.isl // size) - 1 if size else 0
    for number in range(num_requests):
        ids = (0, *range(1 + number * num_own, 1 + (number + 1) * num_own)) if size else ()
        records.append(TraceRecord(now, workload.isl, workload.osl, ids, size or MOONCAKE_BLOCK_TOKENS))
        now += chance.expovariate(workload.rate)
    return records


def prices_of(worker: Capacity, num_streams: int) -> StepPrice:
    """What a step of `worker` takes, term by term, in seconds. The more streams, the more experts of a
    mixture are read: up to `num_streams` that is spread evenly over them.
    """
    shape = worker.shape
    one, two = shape.flops(1), shape.flops(1, 1)
    compute = worker.prefill_s(8192) / shape.flops(8192)
    linear = 2.0 * shape.num_active_params
    fixed = worker.decode_step_s(1, 0)
    reading = (shape.bytes_read(num_streams) - shape.bytes_read(1)) / worker.bytes_per_s
    return StepPrice(
        fixed_s=fixed,
        token_s=linear * compute,
        pair_s=max(0.0, two - one) * compute,
        stream_s=linear * compute + reading / max(1, num_streams - 1),
        kv_s=worker.decode_step_s(1, 1) - fixed,
    )
