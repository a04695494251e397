"""The target for first tokens: which ways meet it, and which prompts give way to those that still can.

Owns when a prompt gives way, and for how long. A few prompts that take longer to read than the target allows
are a third of all reading where lengths are spread widely; in front of others they make those late as well.
While one gives way it is nowhere but in the router: no worker keeps blocks for it. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from router.config import RouterConfig
from router.decision import Decision, Demand, Plan

# of the target: what is estimated to take that long meets it; others that come later delay it
_SAFE_SHARE = 0.8
# of its own reading time: so much may be ahead of a late prompt where it goes ...
_LITTLE = 0.1
# ... and so long it gives way at most
_PATIENCE = 6.0


def time_left_ms(demand: Demand, config: RouterConfig) -> float | None:
    """Within which a first token is in time; None if there is no target for it."""
    if config.ttft_target_s is None or demand.waited_ms is None:
        return None
    return config.ttft_target_s * 1e3 * _SAFE_SHARE - demand.waited_ms


def give_way(decision: Decision, quickest_ms: float, demand: Demand, config: RouterConfig) -> Decision:
    """`decision`, or to wait in the router for what is ahead there, instead of on the worker.

    `quickest_ms`: what reading takes on the worker that needs least for it.
    """
    target_s, waited_ms = config.ttft_target_s, demand.waited_ms
    queue_ms = decision.terms["queue"]
    if target_s is None or waited_ms is None or queue_ms <= _LITTLE * quickest_ms:
        return decision
    is_late = waited_ms + quickest_ms > target_s * 1e3
    if not is_late or waited_ms >= _PATIENCE * quickest_ms:
        return decision
    wait_ms = decision.terms.get("wait", 0.0) + queue_ms
    terms = {**decision.terms, "queue": 0.0, "wait": wait_ms}
    return replace(decision, plan=Plan.WAIT, terms=terms, gives_way=True)
