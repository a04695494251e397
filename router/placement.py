"""Placement: which workers serve a request, by the configured policy.

Owns the table of policies; each is a pure function of the same shape, in a module of its family. Workers come
as values, chance as an argument, and the decision carries its terms, so that it can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from router.affinity_policy import pick_longest_prefix
from router.config import PolicySetting, RouterConfig
from router.cost_policy import cheapest
from router.decision import Candidate, Decision, Demand, Draw
from router.load_policies import pick_better_of_two, pick_in_turn, pick_least_loaded, place_by

Policy = Callable[
    [Demand, Sequence[Candidate], Sequence[Candidate], RouterConfig, Draw],
    Decision | None,
]
"""(demand, prefill workers, decode workers, settings, draw) → a decision, None if nobody can serve it."""

POLICIES: dict[PolicySetting, Policy] = {
    PolicySetting.COST: cheapest,
    PolicySetting.ROUND_ROBIN: partial(place_by, pick_in_turn),
    PolicySetting.LEAST_LOADED: partial(place_by, pick_least_loaded),
    PolicySetting.POWER_OF_TWO: partial(place_by, pick_better_of_two),
    PolicySetting.PREFIX_AFFINITY: partial(place_by, pick_longest_prefix),
}


def place(
    demand: Demand,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    config: RouterConfig,
    draw: Draw,
) -> Decision | None:
    """Choose workers for `demand`; None if none can serve it at present."""
    return POLICIES[config.policy](demand, prefills, decodes, config, draw)
