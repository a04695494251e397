"""decide: from load to numbers of workers. The autoscaler's only rule book.

Owns the order of things: what is needed, for how long, within which bounds, by whose change of role, and at
last by how many replicas. Nodes follow replicas: Ray's autoscaler starts them for replicas that find no
place, and ends those that are empty. Pure: the same arguments give the same decision, whenever it is asked.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.autoscaler.budget import divide
from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision import Decision, Flip, PoolDecision, PoolState, Rule, State
from cluster.autoscaler.flips import as_if_done, choose, is_under_way, ordered, other, remembered
from cluster.autoscaler.load import Load
from cluster.autoscaler.need import need_of
from cluster.autoscaler.patience import Patience, whole
from core.ids import Role

# times the patience upwards that a phase must have had workers to spare before it gives one away
_GENEROUS_AFTER = 3.0
# of the budget: where so much is needed without any queue, queues hardly ever end
_MOST_OF = 0.75
# times its usual start, after which a replica that does not run is given up
_LATE_AFTER = 10.0


def decide(load: Load, config: AutoscalingConfig, state: State, now: float) -> tuple[Decision, State]:
    """What is wanted, and the state for the next decision. `now` in seconds, of any clock that goes on."""
    return _Question(load, config, state, now).answer()


class _Question:
    """One decision under way."""

    def __init__(self, load: Load, config: AutoscalingConfig, state: State, now: float) -> None:
        self._config = config
        self._now = now
        self._orders = remembered(state.flips, load, now, config.flip_back_delay_s)
        self._pending = tuple(order for order in self._orders if is_under_way(order, now))
        self._load = as_if_done(self._pending, load)
        self._measured = state.measured.after(load)
        is_busy = state.busy_at is None or not load.is_idle
        self._busy_at = now if is_busy or state.busy_at is None else state.busy_at
        self._is_asleep = now - self._busy_at >= config.idle_delay_s
        self._needs = {
            role: need_of(role, self._load, self._measured, config, config.startup_s) for role in Role
        }
        self._quick_needs = {
            role: need_of(role, self._load, self._measured, config, config.flip_s) for role in Role
        }
        self._pools = {role: self._remembered(role, state.pool(role)) for role in Role}

    def _remembered(self, role: Role, pool: PoolState) -> PoolState:
        config, is_complete = self._config, self._load.is_complete
        return PoolState(
            pool.slow.after(
                self._now,
                self._needs[role],
                (config.scale_up_delay_s, config.scale_down_delay_s),
                is_complete,
            ),
            pool.quick.after(
                self._now,
                self._quick_needs[role],
                (config.scale_up_delay_s, self._generous_after_s),
                is_complete,
            ),
        )

    @property
    def _generous_after_s(self) -> float:
        return _GENEROUS_AFTER * max(self._config.scale_up_delay_s, self._config.period_s)

    def answer(self) -> tuple[Decision, State]:
        wanted = {role: self._wanted(role) for role in Role}
        rules = {role: self._rule(role, wanted[role]) for role in Role}
        divided = self._within_budget(wanted)
        rules |= {role: Rule.BUDGET for role in Role if divided[role] < wanted[role]}
        flips = self._flips(divided) if self._config.can_flip else ()
        rules |= {flip.role: Rule.FLIP for flip in flips}
        after = as_if_done(ordered(flips, self._load, self._now), self._load)
        hoped = {role: self._replicas(role, divided, after, bool(flips)) for role in Role}
        replicas = self._paid(hoped, wanted)
        rules |= {role: Rule.BUDGET for role in Role if replicas[role] < hoped[role]}
        decisions = {}
        for role in Role:
            num_target = self._load.pool(role).num_target
            rule = self._final_rule(role, rules[role], replicas[role], divided[role], after)
            self._note(role, replicas[role], num_target)
            decisions[role] = PoolDecision(replicas[role], rule, self._needs[role], self._quick_needs[role])
        return Decision(decisions[Role.PREFILL], decisions[Role.DECODE], flips), self._next(flips)

    # ------------------------------------------------------------ how many are wanted

    def _wanted(self, role: Role) -> int:
        """Workers of the role, both bounds of its pool kept."""
        supply, need, slow = self._load.supply(role), self._needs[role], self._pools[role].slow
        if need.num_workers is None:
            return supply
        if self._is_asleep:
            return self._config.min_workers(role)
        if supply == 0 and need.num_workers > 0:
            return self._config.within(role, max(1, whole(need.num_workers)))
        least = slow.least(self._now, self._config.scale_up_delay_s)
        most = slow.most(self._now, self._config.scale_down_delay_s, self._config.scale_down_margin)
        wanted = supply
        if least > supply:
            wanted = least
        elif most is not None and most < supply and not self._is_settling(role):
            # the last one leaves only when nothing was asked for long
            wanted = max(1, most)
        return self._config.within(role, wanted)

    def _is_settling(self, role: Role) -> bool:
        """Whether what was asked for last has not had its time: to start, and then to show what it does. A
        replica that does not start at all is not waited for for ever.
        """
        grown_at, config = self._pools[role].slow.grown_at, self._config
        if grown_at is None:
            return False
        pool = self._load.pool(role)
        starts = 1.0 if pool.num_running >= pool.num_target else _LATE_AFTER
        return self._now - grown_at < starts * config.startup_s + config.scale_down_delay_s

    def _rule(self, role: Role, wanted: int) -> Rule:
        supply, need = self._load.supply(role), self._needs[role].num_workers
        if need is None:
            return Rule.UNKNOWN
        if wanted > supply:
            return Rule.WAKE if supply == 0 else Rule.GROW
        if wanted < supply:
            return Rule.SLEEP if self._is_asleep else Rule.SHRINK
        least = self._pools[role].slow.least(self._now, self._config.scale_up_delay_s)
        return Rule.BOUND if least > self._config.most_workers(role) else Rule.HOLD

    def _within_budget(self, wanted: dict[Role, int]) -> dict[Role, int]:
        budget = self._config.budget(self._load.gpus_per_worker)
        if budget is None:
            return wanted
        present = {role: self._load.supply(role) for role in Role}
        return divide(wanted, self._shares(budget), self._least(wanted), present, budget)

    def _shares(self, budget: int) -> dict[Role, float]:
        """What to divide by. What waits is counted for the phase that is full, and for the other one as soon
        as that has been given more: where the rest needs most of the budget, it is divided by that.
        """
        flowing = {role: self._needs[role].num_flowing for role in Role}
        if sum(flowing.values()) > _MOST_OF * budget and all(flowing.values()):
            return flowing
        return {role: self._needs[role].num_workers or 0.0 for role in Role}

    def _least(self, wanted: dict[Role, int]) -> dict[Role, int]:
        """No answer ends without decode."""
        return {
            role: max(self._config.min_workers(role), int(role is Role.DECODE and wanted[role] > 0))
            for role in Role
        }

    # ------------------------------------------------------------ whose role changes

    def _flips(self, wanted: dict[Role, int]) -> tuple[Flip, ...]:
        """Not while some are under way: their effect is to be seen first."""
        if self._pending:
            return ()
        held = {role: self._held(role) for role in Role}
        for role in Role:
            num_short = self._num_short(role, wanted)
            num_spare = self._num_spare(other(role), wanted)
            flips = choose(self._load, role, min(num_short, num_spare), held[role])
            if flips:
                return flips
        for role in Role:
            # whoever is not needed where it helped goes home, before any pool shrinks
            num_surplus = self._load.supply(other(role)) - wanted[other(role)]
            flips = choose(self._load, role, num_surplus, held[role], is_home_only=True)
            if flips:
                return flips
        return ()

    def _held(self, role: Role) -> set[str]:
        """Workers that left the role too short a while ago to go back to it; nobody while it has no other."""
        if not self._load.of_role(role):
            return set()
        return {order.flip.worker_id for order in self._orders if order.flip.role is not role}

    def _num_short(self, role: Role, wanted: dict[Role, int]) -> int:
        """Workers that the role lacks now or will lack when a replica could be there."""
        num_working = len(self._load.of_role(role))
        quick = self._pools[role].quick.least(self._now, self._config.scale_up_delay_s)
        supply = self._load.supply(role)
        return max(wanted[role] - supply, quick - max(num_working, supply))

    def _num_spare(self, role: Role, wanted: dict[Role, int]) -> int:
        """Workers that the role can do without, with a margin, now and when a replica could be there."""
        num_working, supply = len(self._load.of_role(role)), self._load.supply(role)
        if wanted[role] < supply:
            return min(num_working, supply) - max(wanted[role], 1)
        pool = self._pools[role]
        most = pool.quick.most(self._now, self._generous_after_s, self._config.scale_down_margin)
        if most is None:
            return 0
        margin = 1.0 + self._config.scale_down_margin
        soon = whole((self._needs[role].num_at_most or 0.0) * margin)
        return num_working - max(most, soon, self._config.min_workers(role), 1)

    # ------------------------------------------------------------ how many replicas

    def _replicas(self, role: Role, wanted: dict[Role, int], after: Load, is_flipping: bool) -> int:
        """Of the pool, once roles have changed as in `after`."""
        num_target, num_lacking = self._load.pool(role).num_target, wanted[role] - after.supply(role)
        if self._needs[role].num_workers is None:
            return num_target
        if num_lacking >= 0:
            return self._config.within(role, num_target + num_lacking)
        # Serve chooses who stops: it must not be one that is needed in the other role
        is_settled = not is_flipping and not self._pending
        can_shrink = is_settled and not any(after.num_away(home) for home in Role)
        return self._config.within(role, num_target + num_lacking) if can_shrink else num_target

    def _paid(self, hoped: dict[Role, int], wanted: dict[Role, int]) -> dict[Role, int]:
        """Replicas that the budget has room for, whatever workers are at: a pool that may not shrink yet
        leaves less to the other one, and so do replicas that still leave. Only targets beyond it are cut.
        """
        budget = self._config.budget(self._load.gpus_per_worker)
        if budget is None:
            return hoped
        pools, least = {role: self._load.pool(role) for role in Role}, self._least(wanted)
        targets = {role: pools[role].num_target for role in Role}
        kept = {role: max(min(targets[role], hoped[role]), least[role]) for role in Role}
        if sum(kept.values()) > budget:
            return divide(hoped, self._shares(budget), least, targets, budget)
        num_leaving = sum(max(0, pools[role].num_running - hoped[role]) for role in Role)
        num_free = max(budget - num_leaving, sum(kept.values()))
        return divide(hoped, self._shares(budget), kept, targets, num_free)

    def _final_rule(self, role: Role, rule: Rule, num_replicas: int, wanted: int, after: Load) -> Rule:
        if num_replicas == self._load.pool(role).num_target:
            if wanted > after.supply(role):
                return Rule.BUDGET if rule is Rule.BUDGET else Rule.BOUND
            if rule in (Rule.GROW, Rule.SHRINK, Rule.SLEEP, Rule.WAKE):
                return Rule.FLIP if self._pending else Rule.HOLD
        return rule

    # ------------------------------------------------------------ what is remembered

    def _note(self, role: Role, num_replicas: int, num_target: int) -> None:
        pool = self._pools[role]
        if num_replicas > num_target:
            slow = pool.slow.grown(self._now, self._config.scale_down_delay_s)
        elif num_replicas < num_target:
            slow = pool.slow.shrunk(self._now, num_replicas)
        else:
            return
        self._pools[role] = replace(pool, slow=slow)

    def _next(self, flips: tuple[Flip, ...]) -> State:
        for flip in flips:
            to, away = self._pools[flip.role], self._pools[other(flip.role)]
            num_left = len(self._load.of_role(other(flip.role))) - len(flips)
            grown = to.quick.grown(self._now, self._generous_after_s)
            self._pools[flip.role] = replace(to, quick=grown)
            shrunk: Patience = away.quick.shrunk(self._now, num_left)
            self._pools[other(flip.role)] = replace(away, quick=shrunk)
        orders = ordered(flips, self._load, self._now)
        names = {flip.worker_id for flip in flips}
        return State(
            self._pools[Role.PREFILL],
            self._pools[Role.DECODE],
            self._measured,
            self._busy_at,
            (*(order for order in self._orders if order.flip.worker_id not in names), *orders),
        )
