"""Placement: the cheapest way to serve a request, in milliseconds.

Owns the cost function and the rules that no cost overrides. Pure: workers come as values, chance as an
argument, and the decision carries its terms, so that it can be explained. Knows no calls and no time.

cost(remote) = queue(P) + uncached tokens on P / rate(P) + missing bytes / bandwidth + handoff overhead +
slowdown(D) cost(local)  = queue(D) + penalty × uncached tokens on D / rate(D) + slowdown(D)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from core.ids import WorkerRef
from core.kv_layout import KVLayout
from core.worker_status import WorkerStatus
from router.config import PlanSetting, RouterConfig

_EXPECTED_OUTPUT_TOKENS = 32
_NO_ROOM_MS = 10_000.0


class Plan(StrEnum):
    """`REMOTE`: P reads, D continues. `LOCAL`: D does both. `PREFILL_ONLY`: P's one token is the whole
    answer.
    """

    REMOTE = "remote"
    LOCAL = "local"
    PREFILL_ONLY = "prefill_only"


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed. `num_tokens` is prompt plus emitted tokens; `is_ended_by_prefill`: at most
    one token is wanted.
    """

    num_tokens: int
    num_samples: int = 1
    is_ended_by_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as placement sees it. `num_cached_tokens`: prefix it is thought to hold; reserved: placed
    since its status.

    `is_handoff_target`: whether KV may be sent to it (a decode worker whose transfers just failed may still
    prefill).
    """

    ref: WorkerRef
    layout: KVLayout
    status: WorkerStatus | None = None
    num_cached_tokens: int = 0
    num_reserved_tokens: int = 0
    num_reserved_seqs: int = 0
    is_handoff_target: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why: the terms add up to `cost_ms`."""

    plan: Plan
    prefill: Candidate | None
    decode: Candidate | None
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def cost_ms(self) -> float:
        return sum(self.terms.values())

    @property
    def reader(self) -> Candidate:
        """The worker that reads the prompt."""
        found = self.prefill or self.decode
        assert found is not None
        return found


def place(
    demand: Demand,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    config: RouterConfig,
    chance: random.Random,
) -> Decision | None:
    """The cheapest decision, by chance among near ties; None if no worker can serve the demand at present.

    `config.plan` narrows the choice as long as it leaves one: remote needs a prefill worker, local none.
    """
    remote, local = _remote(demand, prefills, decodes, config), _local(demand, decodes, config)
    match config.plan:
        case PlanSetting.REMOTE:
            options = remote or local
        case PlanSetting.LOCAL:
            options = local or remote
        case PlanSetting.AUTO:
            options = [option for option in remote if not _is_all_cached(demand, option.decode)] + local
    if not options:
        return None
    best = min(option.cost_ms for option in options)
    return chance.choice([option for option in options if option.cost_ms <= best + config.tie_ms])


def _remote(
    demand: Demand, prefills: Sequence[Candidate], decodes: Sequence[Candidate], config: RouterConfig
) -> list[Decision]:
    if demand.is_ended_by_prefill:
        return [
            Decision(Plan.PREFILL_ONLY, prefill, None, _reading_terms(demand, prefill, config))
            for prefill in prefills
        ]
    return [
        Decision(Plan.REMOTE, prefill, decode, _remote_terms(demand, prefill, decode, config))
        for prefill in prefills
        for decode in decodes
        if decode.is_handoff_target and prefill.layout == decode.layout
    ]


def _local(demand: Demand, decodes: Sequence[Candidate], config: RouterConfig) -> list[Decision]:
    options = []
    for decode in decodes:
        terms = _reading_terms(demand, decode, config)
        terms["prefill"] *= config.local_prefill_penalty
        terms["slowdown"] = _slowdown_ms(demand, decode, config)
        options.append(Decision(Plan.LOCAL, None, decode, terms))
    return options


def _remote_terms(
    demand: Demand, prefill: Candidate, decode: Candidate, config: RouterConfig
) -> dict[str, float]:
    num_missing = max(0, demand.num_tokens - decode.num_cached_tokens)
    return {
        **_reading_terms(demand, prefill, config),
        "transfer": num_missing * decode.layout.bytes_per_token / config.assumed_bytes_per_s * 1e3,
        "handoff": config.handoff_overhead_ms,
        "slowdown": _slowdown_ms(demand, decode, config),
    }


def _reading_terms(demand: Demand, worker: Candidate, config: RouterConfig) -> dict[str, float]:
    """Waiting for the tokens before ours, then computing those that are not cached (one at least)."""
    status = worker.status
    rate = (status.prefill_tokens_per_s if status else 0.0) or config.assumed_prefill_tokens_per_s
    num_ahead = worker.num_reserved_tokens
    if status is not None:
        num_ahead += status.num_waiting_tokens + status.num_running_tokens
    num_uncached = max(1, demand.num_tokens - worker.num_cached_tokens)
    return {"queue": num_ahead / rate * 1e3, "prefill": num_uncached / rate * 1e3}


def _slowdown_ms(demand: Demand, decode: Candidate, config: RouterConfig) -> float:
    """What the batch and the pool of a decode worker cost the answer, for an answer of ordinary length."""
    status = decode.status
    if status is None:
        return config.assumed_step_s * 1e3 * decode.num_reserved_seqs
    step_ms = (status.step_s or config.assumed_step_s) * 1e3
    num_seqs = status.num_running + status.num_waiting + decode.num_reserved_seqs
    slowdown = step_ms * _EXPECTED_OUTPUT_TOKENS * num_seqs / max(1, status.max_num_seqs)
    num_missing = max(0, demand.num_tokens - decode.num_cached_tokens)
    num_needed = decode.layout.num_blocks(num_missing) + demand.num_samples
    has_room = num_needed <= status.num_free_blocks + status.num_cached_blocks
    is_full = num_seqs + demand.num_samples > status.max_num_seqs
    return slowdown + (0.0 if has_room else _NO_ROOM_MS) + (step_ms * num_seqs if is_full else 0.0)


def _is_all_cached(demand: Demand, decode: Candidate | None) -> bool:
    """Whether each full block is on the decode worker: then there is nothing to hand over but the tail."""
    if decode is None:
        return False
    num_full = demand.num_tokens - demand.num_tokens % decode.layout.block_size
    return 0 < num_full <= decode.num_cached_tokens
