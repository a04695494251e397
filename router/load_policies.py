"""Policies that look at load alone: round robin, least loaded, the better of two.

For comparison with the cost policy. They read prompts remotely whenever there is a prefill worker, unless
the operator's plan says otherwise, and take both workers by the same rule. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.config import PlanSetting, RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan

Pick = Callable[[Sequence[Candidate], Draw], Candidate]
"""One of some candidates; there is at least one."""


def place_by(
    pick: Pick,
    demand: Demand,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    config: RouterConfig,
    draw: Draw,
) -> Decision | None:
    """Both workers as `pick` takes them; None if no worker can serve the demand at present."""
    if demand.is_ended_by_prefill and prefills and not (config.plan is PlanSetting.LOCAL and decodes):
        return Decision(Plan.PREFILL_ONLY, pick(prefills, draw), None)
    layouts = {worker.layout for worker in prefills}
    targets = [
        worker
        for worker in decodes
        if worker.is_handoff_target and any(layout.can_become(worker.layout) for layout in layouts)
    ]
    if targets and config.plan is not PlanSetting.LOCAL and not demand.is_ended_by_prefill:
        decode = pick(targets, draw)
        fitting = [worker for worker in prefills if worker.layout.can_become(decode.layout)]
        return Decision(Plan.REMOTE, pick(fitting, draw), decode)
    return Decision(Plan.LOCAL, None, pick(decodes, draw)) if decodes else None


def pick_in_turn(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """One after the other, by name."""
    return sorted(candidates, key=lambda worker: worker.ref.worker_id)[draw.turn % len(candidates)]


def pick_least_loaded(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """The one with the fewest tokens ahead, among equals the fewest sequences, then by chance."""
    least = min(_load(worker) for worker in candidates)
    return draw.chance.choice([worker for worker in candidates if _load(worker) == least])


def pick_better_of_two(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """The less loaded of two by chance. Source: Mitzenmacher, The power of two choices in randomized load
    balancing (2001).
    """
    return pick_least_loaded(draw.chance.sample(list(candidates), min(2, len(candidates))), draw)


def _load(worker: Candidate) -> tuple[int, int]:
    return worker.num_ahead_tokens, worker.num_seqs
