"""From a model, a GPU, a workload and its targets to two pools: how many workers of how many GPUs.

Owns the search: each pool takes the arrangement with the fewest GPUs that keeps its target, prefill by the
time to first token with its queue, decode by the inter-token latency and by memory. The first token is
sampled by prefill, so the transfer is not part of it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.planner.capacity import Capacity, Shares
from cluster.planner.hardware import Gpu
from cluster.planner.model_shape import ModelShape
from cluster.planner.waiting import waiting_quantile_s
from core.errors import InvalidConfig

ATTAINMENT = 0.9
_GPUS_PER_WORKER = (1, 2, 4, 8)
# the search counts workers one by one; no service on earth is asked so often
_MAX_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of `isl` tokens, `num_cached` of them cached, answers of `osl`, `rate` requests a second."""

    isl: int
    osl: int
    rate: float
    num_cached: int = 0

    def __post_init__(self) -> None:
        if self.isl < 1 or self.osl < 1:
            raise InvalidConfig("prompts and answers have at least one token", key="isl")
        if not 0 < self.rate <= _MAX_RATE:
            raise InvalidConfig(
                f"the rate must be above 0 and at most {_MAX_RATE:.0e} requests a second", key="rate"
            )
        if not 0 <= self.num_cached < self.isl:
            raise InvalidConfig("cached tokens are part of the prompt, and at least one is not", key="cached")

    @property
    def longest(self) -> int:
        return self.isl + self.osl

    @property
    def mean_context(self) -> int:
        """Tokens of KV of a sequence in the middle of its answer."""
        return self.isl + self.osl // 2


@dataclass(frozen=True, slots=True)
class Targets:
    """What 90 % of requests are to keep: time to first token and inter-token latency, in seconds."""

    ttft_s: float
    itl_s: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft_s < math.inf and 0 < self.itl_s < math.inf):
            raise InvalidConfig("targets must be above 0, and finite", key="slo")


@dataclass(frozen=True, slots=True)
class Pool:
    """`num_workers` workers of `capacity`. `latency_s` is the TTFT or the ITL expected at the workload's
    rate; `batch` the sequences of one worker at once; `usage` how busy it is.
    """

    capacity: Capacity
    num_workers: int
    latency_s: float
    batch: float
    usage: float

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.capacity.num_gpus


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    targets: Targets
    prefill: Pool
    decode: Pool

    @property
    def num_gpus(self) -> int:
        return self.prefill.num_gpus + self.decode.num_gpus

    @property
    def ratio(self) -> float:
        """Prefill GPUs for each decode GPU."""
        return self.prefill.num_gpus / self.decode.num_gpus

    def usd_per_million(self, usd_per_gpu_hour: float) -> tuple[float, float]:
        """(per million output tokens, per million tokens in and out) at the workload's rate."""
        per_s = self.num_gpus * usd_per_gpu_hour / 3600
        outputs = self.workload.rate * self.workload.osl
        return per_s / outputs * 1e6, per_s / (outputs + self.workload.rate * self.workload.isl) * 1e6


def make_plan(
    shape: ModelShape,
    gpu: Gpu,
    workload: Workload,
    targets: Targets,
    shares: Shares,
    num_gpus: int | None = None,
) -> Plan:
    """The fewest GPUs; `num_gpus` fixes those of a worker. Raises InvalidConfig: what cannot be kept."""
    workers = tuple(arrangements(shape, gpu, workload.longest, shares, num_gpus))
    prefills = [pool for worker in workers if (pool := _prefill_pool(worker, workload, targets)) is not None]
    if not prefills:
        best = min(worker.prefill_s(workload.isl, workload.num_cached) for worker in workers)
        raise InvalidConfig(
            f"reading {workload.isl - workload.num_cached} tokens takes {best * 1e3:.0f} ms at best on "
            f"{workers[-1].num_gpus} x {gpu.name}: a first token within {targets.ttft_s * 1e3:.0f} ms is out "
            "of reach",
            key="slo-ttft",
        )
    decodes = [pool for worker in workers if (pool := _decode_pool(worker, workload, targets)) is not None]
    if not decodes:
        best = min(worker.decode_step_s(1, workload.mean_context) for worker in workers)
        raise InvalidConfig(
            f"a step of one sequence takes {best * 1e3:.1f} ms at best on {workers[-1].num_gpus} x {gpu.name}"
            f": tokens within {targets.itl_s * 1e3:.1f} ms are out of reach",
            key="slo-itl",
        )
    return Plan(workload, targets, min(prefills, key=_order), min(decodes, key=_order))


def arrangements(
    shape: ModelShape, gpu: Gpu, longest: int, shares: Shares, num_gpus: int | None = None
) -> Iterator[Capacity]:
    """Workers of 1, 2, 4, 8 GPUs (or of `num_gpus`) in which the weights and one sequence fit.

    Raises InvalidConfig when none does.
    """
    if num_gpus is not None and num_gpus < 1:
        raise InvalidConfig("a worker has at least one GPU", key="gpus-per-worker")
    sizes = (num_gpus,) if num_gpus else tuple(size for size in _GPUS_PER_WORKER if size <= gpu.gpus_per_node)
    workers = [Capacity(shape, gpu, size, shares) for size in sizes]
    fitting = [worker for worker in workers if worker.num_sequences(longest) > 0]
    if not fitting:
        need = shape.weight_bytes + shape.kv_bytes(longest)
        raise InvalidConfig(
            f"{shape.name} needs {need / 1e9:.0f} GB (weights {shape.weight_bytes / 1e9:.0f}, one sequence "
            f"of {longest} tokens {shape.kv_bytes(longest) / 1e9:.1f}), {sizes[-1]} x {gpu.name} give "
            f"{workers[-1].memory_bytes / 1e9:.0f}",
            key="gpu",
        )
    yield from fitting


def _order(pool: Pool) -> tuple[int, float]:
    return pool.num_gpus, pool.latency_s


def _prefill_pool(worker: Capacity, workload: Workload, targets: Targets) -> Pool | None:
    service_s = worker.prefill_s(workload.isl, workload.num_cached)
    if service_s > targets.ttft_s:
        return None
    count = max(1, math.ceil(workload.rate * service_s / worker.shares.load))
    while (
        ttft_s := service_s + waiting_quantile_s(count, workload.rate, service_s, ATTAINMENT)
    ) > targets.ttft_s:
        count += 1
    usage = workload.rate * service_s / count
    return Pool(worker, count, ttft_s, usage, usage)


def _decode_pool(worker: Capacity, workload: Workload, targets: Targets) -> Pool | None:
    batch = worker.max_batch(workload.mean_context, workload.longest, targets.itl_s)
    if batch == 0:
        return None
    planned = max(1.0, batch * worker.shares.load)
    requests_per_s = planned / (
        worker.decode_step_s(math.ceil(planned), workload.mean_context) * workload.osl
    )
    count = max(1, math.ceil(workload.rate / requests_per_s))
    running = _running(worker, workload, count, batch)
    return Pool(
        worker,
        count,
        worker.decode_step_s(math.ceil(running), workload.mean_context),
        running,
        running / batch,
    )


def _running(worker: Capacity, workload: Workload, count: int, batch: int) -> float:
    """Sequences of one worker at once by Little's law: the batch at which as many leave as arrive."""
    low, high = 0.0, float(batch)
    for _ in range(40):
        middle = (low + high) / 2
        step_s = worker.decode_step_s(max(1, math.ceil(middle)), workload.mean_context)
        if middle < workload.rate / count * workload.osl * step_s:
            low = middle
        else:
            high = middle
    return high
