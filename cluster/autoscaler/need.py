"""How many workers of a role the load needs, in fractions of a worker, and what makes it so many.

Owns the arithmetic, for prefill by time to drain, for decode by KV tokens and by the time between two tokens.
Knows no bounds, no patience and no present number of replicas beyond those that work. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.load import Load, RouterLoad, WorkerLoad, mean
from core.ids import Role

# demand is not believed to grow beyond this many times what it is
_MAX_GROWTH = 2.0
# of places or blocks in use, above which newcomers wait
_FULL = 0.9
# of a worker: whoever asks for anything needs one
_SOME = 1e-3


class Cause(StrEnum):
    """What needs the most. IDLE: nothing needs any. QUEUE: prompts that wait; ARRIVALS: those that come.
    KV: blocks; ITL: time between tokens; PLACES: sequences at a time. DEMAND: something is asked, but nothing
    was measured yet. UNKNOWN: nobody says.
    """

    IDLE = "idle"
    QUEUE = "queue"
    ARRIVALS = "arrivals"
    KV = "kv"
    ITL = "itl"
    PLACES = "places"
    DEMAND = "demand"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Need:
    """`num_workers` is None where it is unknown. What was counted in a short time is uncertain: it may be
    `num_at_most`, a standard deviation more; `num_workers` is one less. `is_target_reachable`: whether the
    target of the phase, TTFT or ITL, could be met by any number of workers. `num_flowing`: for what comes and
    for the streams that are there, without what waits.
    """

    num_workers: float | None
    cause: Cause
    is_target_reachable: bool = True
    num_at_most: float | None = None
    num_flowing: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What workers can do, as last seen: it stands while none is there to be measured."""

    prefill_tokens_per_s: float | None = None
    num_kv_tokens: float | None = None
    max_num_seqs: float | None = None
    step_base_s: float | None = None
    step_stream_s: float | None = None
    itl_s: float | None = None

    def after(self, load: Load) -> Measured:
        """Brought up to date by those who report."""
        decode = load.of_role(Role.DECODE)
        steps = self._step_news(decode)
        fresh = Measured(
            mean(worker.prefill_tokens_per_s for worker in load.of_role(Role.PREFILL)),
            mean(worker.num_kv_tokens or None for worker in decode),
            mean(worker.max_num_seqs or None for worker in decode),
            mean(worker.step_base_s for worker in steps),
            mean(worker.step_stream_s for worker in steps),
            None if load.router is None else load.router.itl_s,
        )
        return Measured(
            fresh.prefill_tokens_per_s or self.prefill_tokens_per_s,
            fresh.num_kv_tokens or self.num_kv_tokens,
            fresh.max_num_seqs or self.max_num_seqs,
            fresh.step_base_s or self.step_base_s,
            fresh.step_stream_s or self.step_stream_s,
            fresh.itl_s or self.itl_s,
        )

    def _step_news(self, decode: Sequence[WorkerLoad]) -> Sequence[WorkerLoad]:
        """Whose steps tell something new. What an idle worker measured may be from quite another time; and a
        step of which the streams seem to be all, and nothing fixed, is what is left of a time when others had
        the machine: that parts of it were known before counts for more.
        """
        running = [worker for worker in decode if worker.num_running]
        if self.step_base_s is None or self.step_stream_s is None:
            return running or decode
        return [worker for worker in running if worker.step_base_s]


def need_of(role: Role, load: Load, measured: Measured, config: AutoscalingConfig, lead_s: float) -> Need:
    """For demand as it will be in `lead_s`, after which a change made now would show."""
    count = prefill_need if role is Role.PREFILL else decode_need
    need = count(load.at(-1.0), measured, config, lead_s)
    return replace(need, num_at_most=count(load.at(1.0), measured, config, lead_s).num_workers)


def prefill_need(load: Load, measured: Measured, config: AutoscalingConfig, lead_s: float) -> Need:
    """(queued + arriving tokens) / (what a worker reads in the time that they may take).

    The queue is the one that is left after `lead_s` of arriving and reading: what the present workers, and
    those that are starting, have read by then needs no others. It may take the TTFT's target to drain, or as
    long as it has taken to get help, if that is longer: a queue of a minute need not be gone in a second.
    What waits for room in a full decode pool waits for no prefill worker.
    """
    router = load.router
    if router is None:
        return Need(None, Cause.UNKNOWN)
    readers = load.of_role(Role.PREFILL)
    num_queued = sum(worker.num_waiting_tokens for worker in load.workers)
    num_queued += sum(worker.num_running_tokens for worker in readers)
    if not _is_decode_full(load, config):
        num_queued += round(router.num_waiting_tokens * (1.0 - router.cached_share))
    arriving = router.uncached_tokens_per_s * _growth(router, lead_s)
    if not num_queued and arriving <= 0:
        return Need(0.0, Cause.IDLE)
    rate = measured.prefill_tokens_per_s
    if rate is None:
        return Need(1.0, Cause.DEMAND)
    # those that are starting come about halfway
    num_helping = len(readers) + max(0, load.supply(Role.PREFILL) - len(readers)) / 2
    num_left = max(0.0, num_queued + (arriving - num_helping * rate) * lead_s)
    # one prompt is read by one worker: what that takes at least is no reason for more of them
    prompt_s = (router.num_prompt_tokens or 0.0) * (1.0 - router.cached_share) / rate
    budget_s = max(config.target_ttft_s, prompt_s, lead_s)
    by_arrivals = arriving / (rate * config.target_utilization)
    by_queue = num_left / (rate * budget_s)
    cause = Cause.QUEUE if by_queue > by_arrivals else Cause.ARRIVALS
    need = max(by_arrivals + by_queue, _SOME)
    return Need(need, cause, prompt_s <= config.target_ttft_s, num_flowing=by_arrivals)


def decode_need(load: Load, measured: Measured, config: AutoscalingConfig, lead_s: float) -> Need:
    """The larger of two: for the sequences that are there, by what they hold; for the tokens a second that
    arrivals ask for, by what a worker makes at the batch that its bounds allow. The second does not depend on
    how many workers there are: fewer of them would be slower and hold more.
    """
    router = load.router
    if router is None:
        return Need(None, Cause.UNKNOWN)
    workers = load.of_role(Role.DECODE)
    num_seqs = sum(worker.num_running + worker.num_waiting for worker in workers)
    num_tokens = sum(worker.num_held_tokens for worker in workers)
    if not num_seqs and not router.num_open and router.arrivals_per_s <= 0:
        return Need(0.0, Cause.IDLE)
    bounds, is_reachable = _bounds(measured, config)
    kv_tokens = (measured.num_kv_tokens or 0.0) * config.target_kv_utilization
    num_streaming = max((num_seqs / bound for bound in bounds.values()), default=0.0)
    if kv_tokens:
        num_streaming = max(num_streaming, num_tokens / kv_tokens)
    if _is_decode_full(load, config):
        num_seqs += router.num_waiting
        num_tokens += router.num_waiting_tokens
    num_output = router.num_output_tokens or 0.0
    tokens_each = (router.num_prompt_tokens or 0.0) + num_output / 2
    needs = {Cause.DEMAND: _SOME}
    needs |= {cause: num_seqs / bound for cause, bound in bounds.items()}
    if kv_tokens:
        needs[Cause.KV] = num_tokens / kv_tokens
        if tokens_each:
            bounds[Cause.KV] = max(1.0, kv_tokens / tokens_each)
    tightest = min(bounds, key=lambda name: bounds[name], default=Cause.DEMAND)
    step_s, by_rate = _step_s(measured, bounds.get(tightest, 1.0)), 0.0
    if bounds and step_s is not None:
        tokens_per_s = router.arrivals_per_s * _growth(router, lead_s) * num_output
        by_rate = tokens_per_s * step_s / bounds[tightest]
        needs[tightest] = max(needs.get(tightest, 0.0), by_rate)
    cause = max(needs, key=lambda name: needs[name])
    return Need(needs[cause], cause, is_reachable, num_flowing=max(by_rate, num_streaming))


def _bounds(measured: Measured, config: AutoscalingConfig) -> tuple[dict[Cause, float], bool]:
    """Sequences at a time that one worker should have at most, by what bounds them; whether it can meet the
    ITL at all: if not, that is no reason for more workers.
    """
    bounds: dict[Cause, float] = {}
    if measured.max_num_seqs is not None:
        bounds[Cause.PLACES] = max(1.0, measured.max_num_seqs * config.target_utilization)
    base_s, stream_s = measured.step_base_s, measured.step_stream_s
    if base_s is None or stream_s is None:
        return bounds, True
    if base_s + stream_s > config.target_itl_s:
        return bounds, False
    if stream_s > 0:
        bounds[Cause.ITL] = max(1.0, (config.target_itl_s - base_s) / stream_s)
    return bounds, True


def _step_s(measured: Measured, num_streams: float) -> float | None:
    """Of a worker with so many streams; as measured where its parts are not known."""
    if measured.step_base_s is None or measured.step_stream_s is None:
        return measured.itl_s
    return measured.step_base_s + num_streams * measured.step_stream_s


def _is_decode_full(load: Load, config: AutoscalingConfig) -> bool:
    """Whether requests wait because decode has no room: then more prefill would not help them."""
    workers = load.of_role(Role.DECODE)
    num_places = sum(worker.max_num_seqs for worker in workers)
    num_kv_tokens = sum(worker.num_kv_tokens for worker in workers)
    num_seqs = sum(worker.num_running + worker.num_waiting for worker in workers)
    num_held = sum(worker.num_held_tokens for worker in workers)
    is_out_of_places = num_seqs >= _FULL * num_places
    is_out_of_blocks = num_held >= max(_FULL, config.target_kv_utilization) * num_kv_tokens
    return bool(workers) and (is_out_of_places or is_out_of_blocks)


def _growth(router: RouterLoad, lead_s: float) -> float:
    """By what factor demand is expected to have grown after `lead_s`."""
    return min(_MAX_GROWTH, 1.0 + max(0.0, router.growth_per_s) * lead_s)
